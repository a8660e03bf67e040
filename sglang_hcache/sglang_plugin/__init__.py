"""Everything that touches SGLang. ``compat/`` subclasses its classes, one file per release; the rest is neutral.

entry -> flags (main process) and hooks (scheduler process) -> compat -> bridge -> capture, restore, tier.
"""
