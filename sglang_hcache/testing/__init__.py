"""Contract tests, fault and latency wrappers, tiny models: imported by tests only."""
