"""``hcache tiny-model``: small random models, for tests and demos."""
