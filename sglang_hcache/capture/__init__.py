"""The save path: rows of a forward pass become sealed chunks in the host tier [HCache §4.2.2].

``tap`` snapshots rows during the forward pass into ``staging``; ``assembler`` turns them into chunks on its own
thread.
"""
