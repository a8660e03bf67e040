"""Fault wrappers, chunks with known bytes, a Zipf order: for tests and benchmarks."""
