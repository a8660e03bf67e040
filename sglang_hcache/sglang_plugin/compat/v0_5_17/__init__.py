"""SGLang 0.5.17. ``cache`` subclasses its radix cache; ``forward`` and ``batches`` read its other objects."""
