"""Each round of the scheduler: what is saved, and which waiting requests get a restore; ``bridge`` is the way in."""
