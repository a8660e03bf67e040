"""Everything that touches SGLang. ``compat/`` subclasses its classes, one folder per release; ``hooks``,
``stopping`` and ``support`` name its functions and settings; the rest is neutral.

entry -> flags (main process) and hooks (scheduler process) -> compat -> bridge -> capture, restore, tier.
"""
