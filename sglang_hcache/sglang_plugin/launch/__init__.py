"""Flags, refusals and signals to stop: before anything is loaded, but for what the scheduler's process asks of them."""
