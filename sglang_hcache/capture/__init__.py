"""The save path: rows of a forward pass become sealed chunks in the host tier [HCache §4.2.2].

``passes`` copies rows into ``staging`` during the forward pass; ``assembler`` turns them into chunks on its own
thread.
"""
