"""Directories that ranks of one server share."""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hcache.core.config import HCacheConfig
from sglang_hcache.core.errors import StoreFormatError
from sglang_hcache.core.observer import Counters
from sglang_hcache.core.paths import rank_dir, ranks_named_by
from sglang_hcache.store import DiskStore, look_ahead
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.store.volumes import agreement
from sglang_hcache.store.volumes.agreement import stores_in
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


def test_what_they_share_is_as_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, settings = tmp_path / "shared", small_config(tmp_path)
    settings = replace(settings, dirs=(rank_dir(shared, 0, 2),))

    def is_refused(expected: str) -> None:
        for use in (look_ahead, lambda config: DiskStore.open(config, Counters())):
            with pytest.raises(StoreFormatError, match=re.escape(f"{shared} {expected}")):
                use(settings)

    old = os.umask(0)
    try:
        shared.mkdir(0o707)
        is_refused("can be written by other users (mode 707)")
        assert not list(shared.iterdir())
        shared.rmdir()
        open_ranks(shared, 2)
    finally:
        os.umask(old)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o700
    shared.chmod(0o775)
    is_refused("can be written by other users (mode 775)")
    with StoreView.open(settings.dirs) as view:
        assert f"{shared} can be written" in view.directories()[0].reason
    shared.chmod(0o755)
    open_ranks(shared, 2)
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    is_refused("belongs to user")


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


def test_the_stores_in_directories_that_ranks_share(tmp_path: Path) -> None:
    """Also where one is missing: it is out for each of them."""
    open_ranks(tmp_path / "shared", 2)
    dirs = (tmp_path / "unmounted", tmp_path / "shared")
    assert stores_in(dirs) == [tuple(path / f"rank-{rank}-of-2" for path in dirs) for rank in (0, 1)]
    own = (tmp_path / "shared" / "rank-0-of-2",)
    assert stores_in(own) == [own]
    assert stores_in(dirs[:1]) == [dirs[:1]]


def test_directories_of_several_kinds_are_told_apart(tmp_path: Path) -> None:
    one, two, four = (tmp_path / name for name in ("one", "two", "four"))
    for path, num_ranks in ((one, 1), (two, 2), (four, 4)):
        open_ranks(path, num_ranks)
    of_two, of_four = "those of 2 ranks (rank-0-of-2 and so on)", "those of 4 ranks (rank-0-of-4 and so on)"
    (two / "rank-0-of-2").rename(one / "rank-0-of-2")
    for dirs, expected in (
        ((two, four), f"{two} holds {of_two}; {four} holds {of_four}. Name those of one"),
        ((one,), f"{one} holds a store of its own and {of_two}. Name those of one"),
        (
            (four, two / "rank-1-of-2"),
            f"{four} holds {of_four}; {two}/rank-1-of-2 holds a store of its own. ",
        ),
    ):
        with pytest.raises(StoreFormatError, match=re.escape(expected)):
            stores_in(dirs)


def test_a_directory_that_does_not_answer_is_taken_for_what_the_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sick", "well"):
        open_ranks(tmp_path / name, 2)
    has_superblock = agreement.has_superblock

    def fails(path: Path) -> bool:
        if tmp_path / "sick" in (path, *path.parents):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return has_superblock(path)

    monkeypatch.setattr(agreement, "has_superblock", fails)
    found = stores_in([tmp_path / "sick", tmp_path / "well"])
    assert [dirs[0].name for dirs in found] == ["rank-0-of-2", "rank-1-of-2"]
    assert stores_in([tmp_path / "sick"]) == [(tmp_path / "sick",)]


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
