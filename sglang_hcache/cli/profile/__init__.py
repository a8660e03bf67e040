"""``hcache profile``: a server that is started only to measure, and what came of it."""
