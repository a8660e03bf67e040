"""SGLang 0.5.17. ``cache`` subclasses its radix cache; the others read its other objects."""
