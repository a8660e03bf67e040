"""Moving bytes between memory and files: engines, deadlines, threads. Knows nothing of runs or segments."""
