"""Directories: opening them, watching their health, calls and transfers with a deadline."""
