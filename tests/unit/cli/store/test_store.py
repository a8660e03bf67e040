"""``hcache store`` as a user types it: what it prints, as text and as JSON, and its exit status."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sglang_hcache.cli import terminal
from sglang_hcache.cli.store import verify as store_verify
from sglang_hcache.core.errors import CorruptExtentError
from sglang_hcache.core.observer import Counters
from sglang_hcache.core.paths import rank_dir
from sglang_hcache.store import DiskStore
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.testing.stored_chunks import (
    NAMESPACE_ID,
    find_extents,
    make_key,
    make_keys,
    make_run,
    payload_of,
    physical_bytes,
    read_keys,
    small_config,
    write_keys,
)
from tests.unit.store.conftest import flip

LAYERS = (8192, 5000, 4096)

Hcache = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dirs(tmp_path: Path) -> tuple[Path, ...]:
    """A closed store: six runs of four chunks in three segments, a chunk of the last one in quarantine."""
    config = small_config(tmp_path, 2)
    store = DiskStore.open(config, Counters())
    for number in range(6):
        write_keys(store, make_keys(10 * number, 4), LAYERS)
    read_keys(store, make_keys(0, 4))
    path, offset, _ = find_extents(config.dirs[0])[-1]
    flip(path, offset + 4096)
    with pytest.raises(CorruptExtentError):
        read_keys(store, make_keys(50, 4))
    store.close()
    return config.dirs


@pytest.fixture
def shared(tmp_path: Path) -> tuple[Path, ...]:
    """Two directories that two ranks share, each with a store of six runs of four chunks in three segments.

    As of a server, ranks have the same namespaces and each its own keys.
    """
    config = small_config(tmp_path, 2)
    for rank in range(2):
        store = DiskStore.open(
            replace(config, dirs=tuple(rank_dir(path, rank, 2) for path in config.dirs)), Counters()
        )
        for number in range(6):
            write_keys(store, make_keys(1000 * rank + 10 * number, 4), LAYERS)
        store.close()
    return config.dirs


HOLDER = """
import sys
from pathlib import Path
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore
from sglang_hcache.testing.stored_chunks import small_config
store = DiskStore.open(small_config(Path(sys.argv[1]), 2), Counters())
print(flush=True)
sys.stdin.read()
store.close()
"""


class Impatient:
    """Standard input of somebody who presses Ctrl-C."""

    def readline(self) -> str:
        raise KeyboardInterrupt


@pytest.fixture
def holder(dirs: tuple[Path, ...]) -> Iterator[int]:
    """Process id of another process that uses the store."""
    arguments = [sys.executable, "-c", HOLDER, str(dirs[0].parent)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield process.pid
        process.communicate()  # closes its standard input


def as_json(result: tuple[int, str, str], status: int = 0) -> Any:
    code, out, err = result
    assert (code, err) == (status, "")
    return json.loads(out)


def test_stat(hcache: Hcache, dirs: tuple[Path, ...]) -> None:
    code, out, _ = hcache("stat", *dirs)
    assert code == 0
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "not in use" in rows["store"]
    assert "of 16.8 MB" in rows["on disk"]
    assert "23 in 6 runs, 3 segments, 1 namespace" in rows["chunks"]
    assert "1 chunk in quarantine" in rows["not served"]
    assert "8 chunks read" in rows["hits"]
    assert "24 chunks" in rows["written"]
    assert "1 corrupt read," in rows["trouble"]
    for stripe, path in enumerate(dirs):
        assert f"{path}  healthy" in rows[str(stripe)]

    data = as_json(hcache("stat", "--json", *dirs))
    assert data["physical_bytes"] == physical_bytes(dirs) <= data["cap_bytes"] == 2**24
    counts = ("chunks", "runs", "segments", "namespaces", "quarantined_chunks", "unavailable_runs")
    assert [data[name] for name in counts] == [23, 6, 3, 1, 1, 0]
    assert data["lock_holder"] is None
    assert "index" not in data
    assert data["healthy"] is True, "what is in quarantine is served no more"
    assert data["totals"]["chunks_written"] == 24
    assert [item["path"] for item in data["directories"]] == [str(path) for path in dirs]


def test_ls(hcache: Hcache, dirs: tuple[Path, ...]) -> None:
    code, out, _ = hcache("ls", "--limit", "2", *dirs)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["6", "5"]
    assert "1 quarantined" in out.splitlines()[1]
    assert "2 of 6 runs" in out

    data = as_json(hcache("ls", "--limit", "0", "--json", *dirs))
    assert [run["run"] for run in data["runs"]] == [6, 5, 4, 3, 2, 1]
    assert data["of"] == 6
    assert (data["runs"][0]["quarantined_chunks"], data["runs"][1]["quarantined_chunks"]) == (1, 0)
    [space] = as_json(hcache("ls", "--namespaces", "--json", *dirs))["namespaces"]
    assert (bytes.fromhex(space["namespace"]), space["chunks"]) == (b"namespace-for-16", 23)
    assert space["disk_bytes"] == sum(run["disk_bytes"] for run in data["runs"])
    [bad] = as_json(hcache("ls", "--quarantined", "--json", *dirs))["quarantined"]
    assert (bad["key"], bad["run"], bad["chunk"]) == (make_key(50).hex(), 6, 0)
    assert "digest" in bad["reason"]
    assert bad["directory"] == str(dirs[0])
    assert bad["reason"].startswith(f"{dirs[0]}/segment-0000000")
    assert str(dirs[0]) in hcache("ls", "--quarantined", *dirs)[1].replace("\n", "")
    directories = as_json(hcache("stat", "--json", *dirs))["directories"]
    assert [(item["corrupt_extents"], item["io_errors"]) for item in directories] == [(1, 0), (0, 0)]
    assert make_key(50).hex()[:16] in hcache("ls", "--quarantined", *dirs)[1]
    assert hcache("ls", "--namespaces", "--quarantined", *dirs)[0] == 2


def test_ways_to_name_the_directories(hcache: Hcache, dirs: tuple[Path, ...], tmp_path: Path) -> None:
    expected = as_json(hcache("stat", "--json", *dirs))["store_id"]
    config = tmp_path / "tier.yaml"
    config.write_text(f"dirs: [{dirs[1]}, {dirs[0]}]\ndisk_size: 1GB\n")
    for arguments in (["--config", config], [f"{dirs[1]},{dirs[0]}"]):
        assert as_json(hcache("stat", "--json", *arguments))["store_id"] == expected
    config.with_name("host-only.yaml").write_text("host_size: 1GB\n")
    for arguments, message in (
        ([], "name the store"),
        (["--config", config, *dirs], "name the store"),
        (["--config", tmp_path / "none.yaml"], "--config: cannot read"),
        (["--config", tmp_path / "host-only.yaml"], "sets no `dirs`"),
        ([dirs[0]], "has 2 directories, but 1 is named"),
        ([*dirs, dirs[0]], "names the same directory twice"),
        ([""], "a name is empty"),
        ([*dirs, " "], "a name is empty"),
        ([f"{dirs[0]},"], "a name is empty"),
    ):
        code, out, err = hcache("stat", *arguments)
        assert (code, out) == (2, "")
        assert err.startswith("hcache: error: ")
        assert message in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["stat"],
        ["ls"],
        ["ls", "--namespaces"],
        ["verify"],
        ["fsck"],
        ["gc"],
        ["fsck", "--rebuild"],
        ["clear", "-y"],
    ],
)
def test_each_rank_gets_the_command_in_turn(
    hcache: Hcache, shared: tuple[Path, ...], tmp_path: Path, arguments: list[str]
) -> None:
    alone = as_json(hcache(*arguments, "--json", *(path / "rank-1-of-2" for path in shared)))
    config = tmp_path / "tier.yaml"
    config.write_text(f"dirs: [{shared[0]}, {shared[1]}]\ndisk_size: 1GB\n")
    for named in (shared, ["--config", config]):
        ranks = as_json(hcache(*arguments, "--json", *named))["ranks"]
        assert [answer.pop("rank") for answer in ranks] == [0, 1]
        assert [answer.keys() for answer in ranks] == [alone.keys()] * 2
        code, out, _ = hcache(*arguments, *named)
        assert code == 0
        assert [line for line in out.splitlines() if line.startswith("rank ")] == [
            "rank 0 of 2",
            "rank 1 of 2",
        ]


def test_the_worst_of_all_ranks_is_the_exit_status(hcache: Hcache, shared: tuple[Path, ...]) -> None:
    path, offset, _ = find_extents(shared[0] / "rank-0-of-2")[0]
    flip(path, offset + 4096)
    data = as_json(hcache("verify", "--json", *shared), status=1)
    assert [answer["damaged_chunks"] for answer in data["ranks"]] == [1, 0]
    for path in shared:
        (path / "rank-0-of-2").rename(path / "away")
    code, out, err = hcache("stat", "--json", *shared)
    assert code == 2
    failed, well = json.loads(out)["ranks"]
    assert failed.keys() == {"rank", "error"}
    assert (well["rank"], well["runs"]) == (1, 6)
    assert err.startswith(
        f"hcache: error: rank 0 of 2: {shared[0]}/rank-0-of-2 is not a directory of a store"
    )
    assert "6 runs" in hcache("stat", *shared)[1], "one rank's error keeps nobody from looking at the others"


def test_sizes_are_for_all_ranks_and_one_question_is_too(
    hcache: Hcache, shared: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = as_json(hcache("gc", "--to", "900KB", "--json", *shared))
    assert [answer["segments_evicted"] for answer in data["ranks"]] == [1, 1]
    assert sum(answer["physical_bytes"] for answer in data["ranks"]) <= 900_000
    code, out, err = hcache("gc", "--to", "1KB", *shared)
    assert (code, err.count("nothing is left to evict"), out.count("rank ")) == (2, 2, 2)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    code, out, err = hcache("clear", *shared)
    assert (code, out.count("removed 0 chunks"), err.count("Remove all")) == (0, 2, 1)
    assert f"from {shared[0]}, {shared[1]} (of 2 ranks)? " in err


def test_a_namespace_is_erased_from_the_stores_of_all_ranks(hcache: Hcache, shared: tuple[Path, ...]) -> None:
    secrets = [NAMESPACE_ID, NAMESPACE_ID.hex().encode(), *make_keys(0, 4), *make_keys(1050, 4)]

    def found() -> set[bytes]:
        data = b"".join(path.read_bytes() for top in shared for path in top.rglob("*") if path.is_file())
        return {secret for secret in secrets if secret in data}

    for rank in range(2):
        dirs = tuple(rank_dir(path, rank, 2) for path in shared)
        with closing(DiskStore.open(replace(small_config(dirs[0]), dirs=dirs), Counters())) as store:
            store.namespaces.put(NAMESPACE_ID.hex(), {})
    assert found() == {*secrets}
    [one, other] = as_json(hcache("ls", "--namespaces", "--json", *shared))["ranks"]
    assert one["namespaces"][0]["namespace"] == other["namespaces"][0]["namespace"] == NAMESPACE_ID.hex()
    code, out, _ = hcache("clear", "--yes", "--namespace", NAMESPACE_ID.hex(), *shared)
    assert (code, out.count("removed 24 chunks in 6 runs")) == (0, 2)
    assert found() == set()


def test_directories_that_are_not_of_one_server(hcache: Hcache, shared: tuple[Path, ...]) -> None:
    code, out, err = hcache("clear", "--yes", shared[0], shared[1] / "rank-0-of-2")
    assert (code, out) == (2, "")
    assert (
        f"{shared[0]} holds those of 2 ranks (rank-0-of-2 and so on); {shared[1]}/rank-0-of-2 holds a store"
        in err
    )


def test_verify_finds_a_flipped_byte_and_says_where(hcache: Hcache, dirs: tuple[Path, ...]) -> None:
    code, out, _ = hcache("verify", *dirs)
    assert code == 0
    assert "of 6 runs" in out
    assert "no damage" in out
    assert "1 chunk in quarantine before" in out
    assert hcache("verify", "--quarantined", *dirs)[0] == 1
    path, offset, header = find_extents(dirs[1])[0]
    flip(path, offset + 4096 + header.chunk_bytes)
    code, out, _ = hcache("verify", *dirs)
    assert code == 1
    assert "1 damaged chunk" in out
    assert header.place.keys[1].hex()[:16] in out
    data = as_json(hcache("verify", "--json", *dirs), status=1)
    [damage] = data["damages"]
    assert damage["keys"] == [header.place.keys[1].hex()]
    assert (damage["run"], damage["segment"], damage["layer"]) == (1, 0, header.layer)
    assert damage["directory"] == str(dirs[1])
    assert data["checked_bytes"] > 24 * sum(LAYERS)


def test_verify_shows_its_progress(
    dirs: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "_LINE_EVERY_S", 0.0)
    with StoreView.open(dirs) as view:
        outcome = store_verify.run_verification(view, quiet=False)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 6
        assert "(100%)" in lines[-1]
        assert "/s" in lines[-1]
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(store_verify, "Console", lambda: Console(force_terminal=True, width=100))
        assert store_verify.run_verification(view, quiet=False).checked_bytes == outcome.checked_bytes
        assert re.search(r"verifying .*100%.*\d:\d\d:\d\d", capsys.readouterr().out)
        store_verify.run_verification(view, quiet=True)
    assert capsys.readouterr() == ("", "")


def test_fsck_and_its_rebuild(hcache: Hcache, dirs: tuple[Path, ...]) -> None:
    assert hcache("fsck", *dirs)[:2] == (0, "checked 6 runs in 2 directories: no errors\n")
    (dirs[1] / "superblock.json").write_text("?")
    (dirs[0] / "thesis.tex").write_text("?")
    for path in dirs:
        (path / "state.json").write_text("?")
    code, out, _ = hcache("fsck", *dirs)
    assert code == 1
    assert [line.split(": ")[0] for line in out.splitlines()[:1]] == ["error"]
    assert "fix: " in out
    data = as_json(hcache("fsck", "--json", *dirs), status=1)
    assert data["errors"] == 3
    (dirs[0] / "thesis.tex").unlink()
    assert {item["severity"] for item in data["findings"]} == {"error"}
    code, out, _ = hcache("fsck", "--rebuild", *dirs)
    assert code == 0
    assert f"took {dirs[1]} in as directory 1" in out
    assert "6 runs with 24 chunks are complete" in out
    assert hcache("verify", *dirs)[0] == 1  # the quarantine is forgotten, the damage is there


def test_gc(hcache: Hcache, dirs: tuple[Path, ...]) -> None:
    assert "nothing to free" in hcache("gc", *dirs)[1]
    stray = dirs[0] / "segment-00000099.seg"
    stray.write_bytes(bytes(50_000))
    data = as_json(hcache("gc", "--json", *dirs))
    assert (data["removed_files"], data["runs"], data["segments_evicted"]) == (1, 6, 0)
    assert data["physical_bytes_before"] - data["physical_bytes"] > 50_000
    assert not stray.exists()
    code, out, _ = hcache("gc", "--to", "480KB", *dirs)
    assert code == 0
    assert "in 1 segment evicted" in out
    assert physical_bytes(dirs) <= 480_000
    code, _, err = hcache("gc", "--to", "1KB", *dirs)
    assert code == 2
    assert "nothing is left to evict" in err
    assert "--to: 'much' is not a size" in hcache("gc", "--to", "much", *dirs)[2]
    assert "--to: a size is less than 8 EiB" in hcache("gc", "--to", "9000000000TB", *dirs)[2]
    assert "--to: '20' is 20 bytes; write its unit, such as 20GB" in hcache("gc", "--to", "20", *dirs)[2]


@pytest.mark.parametrize("flag", ["--to", "--older-than"])
def test_gc_does_not_take_an_empty_limit_for_none(hcache: Hcache, dirs: tuple[Path, ...], flag: str) -> None:
    code, out, err = hcache("gc", flag, "", *dirs)
    assert (code, out) == (2, "")
    assert f"{flag}: '' is not a" in err


@pytest.mark.parametrize("command", [["ls"], ["gc"], ["verify"], ["clear", "--yes"], ["fsck", "--rebuild"]])
def test_a_variable_that_is_not_set_is_told(hcache: Hcache, command: list[str]) -> None:
    code, out, err = hcache(*command, "")
    assert (code, out) == (2, "")
    assert err == "hcache: error: DIR: a name is empty; is a variable of your shell not set?\n"


def test_clear_asks(hcache: Hcache, dirs: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in ("n\n", "\n", ""):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        code, out, err = hcache("clear", *dirs)
        assert (code, out) == (2, "")
        assert "Remove all 23 chunks" in err
        assert "nothing is removed" in err
    monkeypatch.setattr("sys.stdin", None)  # closed by the caller, as with <&-
    assert hcache("clear", *dirs)[0] == 2
    monkeypatch.setattr("sys.stdin", Impatient())
    assert hcache("clear", *dirs)[0] == 130
    assert as_json(hcache("stat", "--json", *dirs))["chunks"] == 23
    data = as_json(hcache("clear", "--yes", "--json", *dirs))
    assert (data["chunks_removed"], data["chunks"]) == (23, 0)
    assert as_json(hcache("stat", "--json", *dirs))["segments"] == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert hcache("clear", *dirs)[0] == 0


def test_clear_of_one_namespace(
    hcache: Hcache, dirs: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = NAMESPACE_ID.hex()
    store = DiskStore.open(small_config(dirs[0].parent, 2), Counters())
    run = replace(make_run(make_keys(1000, 4), LAYERS), namespace_id=b"somebody else's.")
    store.write_run(run, payload_of(run))
    store.namespaces.put(mine, {"model": "llama", "weights": "0a1b2c3d", "tenant": "01234567"})
    store.close()
    code, out, _ = hcache("ls", "--namespaces", *dirs)
    assert code == 0
    assert re.search(rf"{mine} +llama +0a1b2c3d +01234567 +23 +6 ", out)
    assert re.search(rf"{run.namespace_id.hex()} +\? +\? +\? +4 +1 ", out)
    assert "?: not noted (yet: within a minute)" in out
    spaces = as_json(hcache("ls", "--namespaces", "--json", *dirs))["namespaces"]
    assert [space["owner"].get("tenant") for space in spaces] == ["01234567", None]
    assert all(space["oldest_at"] <= space["written_at"] for space in spaces)

    monkeypatch.setattr("sys.stdin", io.StringIO("no\n"))
    code, _, err = hcache("clear", "--namespace", mine, *dirs)
    assert code == 2
    assert re.search(rf"Remove 23 chunks \(.* KB\) of llama, namespace {mine}\? \[y/N\]", err)
    code, _, err = hcache("clear", "--yes", "--namespace", mine[:8], *dirs)
    assert code == 2
    assert "names no namespace; give the 32 digits that `hcache store ls --namespaces` lists" in err

    code, out, _ = hcache("clear", "--yes", "--namespace", mine, *dirs)
    assert (code, out.partition(";")[0]) == (0, f"removed 23 chunks in 6 runs of {mine}")
    [left] = as_json(hcache("ls", "--namespaces", "--json", *dirs))["namespaces"]
    assert left["namespace"] == run.namespace_id.hex()
    assert hcache("verify", *dirs)[0] == 0
    data = as_json(hcache("clear", "--yes", "--json", "--namespace", mine, *dirs))
    assert (data["namespaces"], data["chunks_removed"], data["chunks"]) == ([mine], 0, 4)


def test_clear_says_what_a_directory_that_is_away_keeps(
    hcache: Hcache, dirs: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    dirs[1].rename(dirs[1].with_name("away"))
    expected = f"{dirs[1]} is out: it does not exist; what is there does not count any more"
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    code, _, err = hcache("clear", *dirs)
    assert (code, expected in err) == (2, True)
    code, out, _ = hcache("clear", "--yes", *dirs)
    assert (code, expected in out) == (0, True)
    data = as_json(hcache("clear", "--yes", "--json", *dirs))
    assert [item["condition"] for item in data["directories"]] == ["healthy", "out"]


def test_beside_another_process_reading_works_and_changing_names_it(
    hcache: Hcache, dirs: tuple[Path, ...], holder: int
) -> None:
    assert f"in use by process {holder}" in hcache("stat", *dirs)[1]
    assert as_json(hcache("stat", "--json", *dirs))["lock_holder"] == str(holder)
    for arguments in (["ls"], ["verify"], ["fsck"]):
        assert hcache(*arguments, *dirs)[0] == 0
    for arguments in (["gc"], ["clear"], ["clear", "--yes"], ["fsck", "--rebuild"]):
        code, out, err = hcache(*arguments, *dirs)
        assert (code, out) == (2, "")
        assert f"in use by process {holder}" in err
    assert as_json(hcache("stat", "--json", *dirs))["runs"] == 6


def test_a_lost_file(hcache: Hcache, dirs: tuple[Path, ...]) -> None:
    """Also where nothing is left that names its runs."""
    (dirs[1] / "segment-00000001.seg").unlink()
    data = as_json(hcache("verify", "--json", *dirs), status=1)
    assert (data["damaged_chunks"], data["lost_runs"]) == (8, 0)
    assert as_json(hcache("fsck", "--json", *dirs), status=1)["errors"] == 1
    (dirs[0] / "segment-00000001.seg").unlink()
    data = as_json(hcache("verify", "--json", *dirs), status=1)
    assert (data["damaged_chunks"], data["lost_runs"], data["damages"]) == (0, 2, [])
    assert ": 2 runs lost with files or headers" in hcache("verify", *dirs)[1]
    code, out, _ = hcache("fsck", *dirs)
    assert (code, out.partition(";")[0]) == (
        1,
        "error: segment-00000001.seg: is missing, 2 runs are lost with it",
    )
    assert as_json(hcache("gc", "--json", *dirs))["runs_forgotten"] == 2
    assert hcache("fsck", *dirs)[0] == hcache("verify", *dirs)[0] == 0


def test_a_missing_directory_and_a_missing_state(hcache: Hcache, dirs: tuple[Path, ...]) -> None:
    for path in dirs:
        (path / "state.json").unlink()
    code, out, _ = hcache("stat", *dirs)
    assert code == 0
    assert "24 in 6 runs" in out
    assert "not known: the state is missing or damaged" in out
    dirs[1].rename(dirs[1].with_name("away"))
    data = as_json(hcache("stat", "--json", *dirs), status=1)
    assert data["healthy"] is False
    assert [item["condition"] for item in data["directories"]] == ["healthy", "out"]
    assert data["directories"][1]["free_bytes"] is None
    code, out, _ = hcache("verify", *dirs)
    assert code == 1  # no run is complete in what is left, so it is not known what was there
    assert f"{dirs[1]}: it does not exist" in out


def test_runs_without_torch_and_sglang(dirs: tuple[Path, ...]) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['sglang'] = None\n"
        "from sglang_hcache.cli.main import main\n"
        "sys.argv[0] = 'hcache'; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "store", "stat", *map(str, dirs)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
