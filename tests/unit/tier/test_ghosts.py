"""What is remembered of chunks that are gone."""

from __future__ import annotations

from sglang_hcache.testing.stored_chunks import make_keys
from sglang_hcache.tier.chunk import Ghosts


def test_what_was_evicted_is_known_and_nothing_else() -> None:
    ghosts, keys = Ghosts(places=2**16), make_keys(0, 2000)
    for key in keys[:1000]:
        ghosts.add(key)
    known = [key in ghosts for key in keys]
    assert sum(known[:1000]) > 980  # one in 65 has lost its place to another
    assert not any(known[1000:])


def test_older_ones_make_room_for_newer_ones() -> None:
    ghosts, keys = Ghosts(places=64), make_keys(0, 1000)
    for key in keys:
        ghosts.add(key)
    assert keys[-1] in ghosts
    assert sum(key in ghosts for key in keys) <= 64
