"""``hcache store clear --any-format``: a store goes whatever made it, and nothing else does."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hcache.core.errors import StoreFormatError
from sglang_hcache.core.observer import Counters
from sglang_hcache.core.paths import rank_dir
from sglang_hcache.store import DiskStore, look_ahead
from sglang_hcache.testing.stored_chunks import make_keys, small_config, write_keys

Hcache = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dirs(tmp_path: Path) -> tuple[Path, ...]:
    """A closed store of another format, with a file of somebody else."""
    config = small_config(tmp_path, 2)
    store = DiskStore.open(config, Counters())
    write_keys(store, make_keys(0, 4), (4096,) * 4)
    store.close()
    for path in config.dirs:
        block = json.loads((path / "superblock.json").read_text())
        (path / "superblock.json").write_text(json.dumps({**block, "format_version": 99}))
    (config.dirs[1] / "index.sqlite-wal").write_bytes(b"as format 3 had")
    (config.dirs[0] / "notes.txt").write_text("mine")
    return config.dirs


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def test_it_asks_and_deletes_only_what_is_of_the_store(
    hcache: Hcache, dirs: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = hcache("clear", "--yes", *dirs)
    assert code == 2
    assert "has store format 99" in err
    assert "hcache store clear --any-format" in err.replace("\n", " ")
    before = [names(path) for path in dirs]
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    code, _, err = hcache("clear", "--any-format", *dirs)
    assert code == 2
    assert f"Delete the store in {dirs[0]} (3 files), {dirs[1]} (4 files), " in err
    assert [names(path) for path in dirs] == before
    code, out, _ = hcache("clear", "--any-format", "--yes", "--json", *dirs)
    assert code == 0
    assert [item["files"] for item in json.loads(out)["directories"]] == [3, 4]
    assert [names(path) for path in dirs] == [{"lock", "notes.txt"}, {"lock"}]
    code, _, err = hcache("clear", "--any-format", "--yes", *dirs)
    assert (code, "holds no store; is its disk mounted? If its store was deleted before" in err) == (2, True)
    (dirs[0] / "notes.txt").unlink()
    DiskStore.open(small_config(dirs[0].parent, 2), Counters()).close()


def test_what_may_be_of_another_program_stays(hcache: Hcache, dirs: tuple[Path, ...]) -> None:
    (dirs[1] / "superblock.json").unlink()
    (dirs[1] / "lock").write_text("of somebody else")
    before = [names(path) for path in dirs]
    code, _, err = hcache("clear", "--any-format", "--yes", *dirs)
    assert code == 2
    assert f"{dirs[1]} has no superblock.json: are its files of a store? Delete them by hand" in err
    assert [names(path) for path in dirs] == before
    assert (dirs[1] / "lock").read_text() == "of somebody else"
    code, _, err = hcache("clear", "--any-format", "--yes", dirs[0].parent / "nowhere")
    assert (code, "is not a directory" in err) == (2, True)
    assert hcache("clear", "--any-format", "--yes", "--namespace", "0" * 32, *dirs)[0] == 2


def test_a_store_in_use_stays(hcache: Hcache, tmp_path: Path) -> None:
    config = small_config(tmp_path / "used", 2)
    store = DiskStore.open(config, Counters())
    write_keys(store, make_keys(0, 4), (4096,) * 4)
    before = [names(path) for path in config.dirs]
    code, _, err = hcache("clear", "--any-format", "--yes", *config.dirs)
    assert (code, "is in use by" in err) == (2, True)
    for path, earlier in zip(config.dirs, before, strict=True):
        assert earlier <= {*names(path), "state.tmp"}
    store.close()


def test_where_no_store_ever_was_nothing_passes_for_deleted(
    hcache: Hcache, dirs: tuple[Path, ...], tmp_path: Path
) -> None:
    unmounted = tmp_path / "unmounted"
    (unmounted / "lost+found").mkdir(parents=True)
    before = [names(path) for path in dirs]
    for wrong, why in ((unmounted, "it is empty: is its disk mounted?"), (tmp_path, "the right directory?")):
        code, _, err = hcache("clear", "--any-format", "--yes", *dirs, wrong)
        assert code == 2
        assert f"{wrong} holds no store; " in err
        assert why in err
    assert [names(path) for path in dirs] == before


def test_what_ranks_stored_does_not_pass_for_deleted(hcache: Hcache, tmp_path: Path) -> None:
    ranks = [tmp_path / rank_dir(Path("tp"), rank, 2) for rank in range(2)]
    for path in ranks:
        DiskStore.open(replace(small_config(tmp_path), dirs=(path,)), Counters()).close()
        (path / "superblock.json").rename(path / "kept")
    code, _, err = hcache("clear", "--any-format", "--yes", tmp_path / "tp")
    assert (code, "holds stores of ranks (rank-" in err) == (2, True)
    for path in ranks:
        (path / "kept").rename(path / "superblock.json")
    assert hcache("clear", "--any-format", "--yes", tmp_path / "tp")[0] == 0
    assert [names(path) for path in ranks] == [{"lock"}] * 2
    code, _, err = hcache("clear", "--any-format", "--yes", tmp_path / "tp")
    assert (code, "holds no store; is its disk mounted?" in err) == (2, True)


def test_one_that_was_killed_can_be_done_again(
    hcache: Hcache, dirs: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = Path.unlink

    def killed(path: Path, missing_ok: bool = False) -> None:
        if path.name == "superblock.json":
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        hcache("clear", "--any-format", "--yes", *dirs)
    assert [names(path) for path in dirs] == [
        {"lock", "notes.txt", "superblock.json"},
        {"lock", "superblock.json"},
    ]
    assert hcache("clear", "--any-format", "--yes", *dirs)[0] == 0
    assert [names(path) for path in dirs] == [{"lock", "notes.txt"}, {"lock"}]


@pytest.mark.parametrize("kind", ["one more", "two stores", "damaged"])
def test_the_command_that_a_refused_start_names_works(hcache: Hcache, tmp_path: Path, kind: str) -> None:
    """Whatever the other directories are: new, empty or of another store."""
    base = tmp_path / "of two words"
    config = small_config(base, 2)
    DiskStore.open(config, Counters()).close()
    other = replace(config, dirs=(base / "other",))
    wrong = replace(config, dirs=(*config.dirs, base / "empty", base / "missing"))
    (base / "empty").mkdir()
    if kind == "two stores":
        DiskStore.open(other, Counters()).close()
        wrong = replace(config, dirs=(config.dirs[0], *other.dirs))
    elif kind == "damaged":
        (config.dirs[0] / "superblock.json").write_text("?")
        wrong = replace(config, dirs=(config.dirs[0], base / "empty"))
    for start in (look_ahead, lambda config: DiskStore.open(config, Counters())):
        with pytest.raises(StoreFormatError) as refusal:
            start(wrong)
    command = re.search("`hcache store (clear --any-format .*)`", str(refusal.value))
    assert command is not None
    code, _, err = hcache(*shlex.split(command[1]), "--yes")
    assert code == 0, err
    DiskStore.open(wrong, Counters()).close()
