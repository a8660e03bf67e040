"""Bytes as they lie on disk: blocks, headers, superblocks, states. Pure."""
