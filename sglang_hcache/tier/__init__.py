"""Host tier and disk tier as one: look up, put, demote, read.

Bytes only; what the bytes mean (hidden states, K and V) is the business of ``capture`` and ``restore``.
"""
