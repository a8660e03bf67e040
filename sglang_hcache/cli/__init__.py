"""The ``hcache`` command. SGLang is launched from here, never imported."""
