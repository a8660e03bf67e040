"""Directories that ranks of one server share."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hcache.core.config import HCacheConfig
from sglang_hcache.core.errors import StoreFormatError
from sglang_hcache.core.observer import Counters
from sglang_hcache.core.paths import rank_dir, ranks_named_by
from sglang_hcache.store import DiskStore, look_ahead
from sglang_hcache.store.volumes.looking import look_at
from sglang_hcache.testing.stored_chunks import small_config


def open_ranks(folder: Path, num_ranks: int) -> None:
    """Once, as a server does."""
    for rank in range(num_ranks):
        settings = replace(small_config(folder), dirs=(rank_dir(folder, rank, num_ranks),))
        look_ahead(settings)
        DiskStore.open(settings, Counters()).close()


def test_each_has_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        open_ranks(tmp_path / "shared", 2)
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == ["rank-0-of-2", "rank-1-of-2"]


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (1, 2)])
def test_what_another_number_of_ranks_left_is_not_forgotten(before: int, after: int, tmp_path: Path) -> None:
    """It would count for no cap."""
    shared = tmp_path / "shared"
    open_ranks(shared, before)
    expected = f"{shared} holds what a server with --tp-size {before} stored"
    with pytest.raises(StoreFormatError, match=re.escape(expected)):
        open_ranks(shared, after)
    assert not list(shared.glob(f"rank-*-of-{after}"))


def test_one_rank_does_not_begin_among_them(tmp_path: Path) -> None:
    open_ranks(tmp_path / "shared", 2)
    with pytest.raises(
        StoreFormatError, match="other files of a server with --tp-size 2 \\('rank-0-of-2'\\)"
    ):
        open_ranks(tmp_path / "shared", 1)


def test_who_looks_is_told_where_they_are(tmp_path: Path) -> None:
    open_ranks(tmp_path / "shared", 2)
    with pytest.raises(
        StoreFormatError,
        match="it holds those of the ranks of a server: rank-0-of-2 and so on; name that of one",
    ):
        look_at([tmp_path / "shared"])
    look_at([tmp_path / "shared" / "rank-1-of-2"]).close()


@pytest.mark.parametrize("name", ["rank-0-of-", "rank-of-2", "rank-0-of-2x", "Rank-0-of-2"])
def test_other_names_are_of_no_rank(name: str) -> None:
    assert ranks_named_by(name) is None
    assert ranks_named_by("rank-11-of-16") == 16


def test_shares_of_a_rank() -> None:
    whole = HCacheConfig.from_settings(
        {"host_size": "4GB", "disk_size": "2GB", "dirs": "/a,/b", "disk_write_budget": "1GB"}
    )
    share = whole.of_rank(1, 2)
    assert (share.host_size, share.disk_size, share.disk_write_budget) == (2 * 10**9, 10**9, 5 * 10**8)
    assert share.dirs == (Path("/a/rank-1-of-2"), Path("/b/rank-1-of-2"))
    assert (share.staging_size, share.segment_size) == (None, None)
    assert whole.of_rank(0, 1) is whole
