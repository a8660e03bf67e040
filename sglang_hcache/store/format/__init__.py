"""Bytes as they lie on disk: blocks, headers, superblocks, rows. Pure."""
