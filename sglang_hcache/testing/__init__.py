"""Fault and latency wrappers, chunks with known bytes: imported by tests only."""
