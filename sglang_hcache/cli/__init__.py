"""The ``hcache`` command. SGLang is launched from here, never imported.

A command is a file, or a folder whose ``command.py`` has its options. These are imported at every start: what takes
long is imported where it is used.
"""
