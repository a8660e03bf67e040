"""Frozen types, units, errors, configuration, chunk keys and the observer protocol.

Everything else builds on this package; it imports the standard library and pydantic only.
"""
