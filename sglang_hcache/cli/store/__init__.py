"""``hcache store``: looking after the disk tier while no server runs."""
