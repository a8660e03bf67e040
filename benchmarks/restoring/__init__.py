"""Restores in one process, without a server: a real model, tiers that hold its state, and measured restores."""
