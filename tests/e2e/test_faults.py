"""A server under load while its disk tier is damaged, taken away, filled up, made to fail, to hang, and killed.

The tests share one server. Its host tier and KV pool hold a fraction of the contexts, so it writes to disk and
restores from there all the time. In each test clients go on asking, and every answer is compared with the right
one; at its end the tier is well again, and serves from disk.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_hcache.core.units import parse_size
from tests.e2e.harness import TierServer, put_back, random_prompt, wait_for
from tests.e2e.load import Context, DiskUsage, Load

CONTEXTS = 12
CLIENTS = 6
DISK_SIZE = "48MB"  # half of the chunks of the contexts and of their references
DEVICE_BYTES = 40 * 2**20
TIER_CONFIG = f"""\
disk_size: {DISK_SIZE}
disk_free_floor: 4MiB
segment_size: 8MiB
host_size: 16MiB  # 40 chunks
io_timeout_s: 1
restore_deadline_s: 60
"""


@dataclass(frozen=True)
class Device:
    """A small file system of its own, seen at ``mounted``. It is the same one when it is attached again."""

    anchor: Path
    mounted: Path

    def attach(self) -> None:
        _run("mount", "--bind", self.anchor, self.mounted)

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Unmounted lazily: files that are open stay so."""
        _run("umount", "--lazy", self.mounted)
        try:
            yield
        finally:
            self.attach()

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Nothing can be opened for writing; it is not gone for a moment either, for the new mount hides the other."""
        wait_for(self._mount_read_only, "a moment in which the server opens nothing for writing")
        try:
            yield
        finally:
            _run("umount", "--lazy", self.mounted)

    def _mount_read_only(self) -> bool:
        """False where a file was opened for writing between both steps: then the mount cannot become read-only."""
        self.attach()
        try:
            _run("mount", "-o", "remount,bind,ro", self.mounted)
        except subprocess.CalledProcessError:
            _run("umount", "--lazy", self.mounted)
            return False
        return True


@dataclass(frozen=True)
class Site:
    """The server and its surroundings."""

    server: TierServer
    contexts: list[Context]
    one: Path
    two: Path
    device: Device | str
    """What ``two`` lies on, or why that is nothing special."""

    @property
    def directories(self) -> tuple[Path, Path]:
        return self.one, self.two


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device | str]:
    """A tmpfs, or the reason why there is none."""
    folder = tmp_path_factory.mktemp("device")
    made = Device(folder / "anchor", folder / "disk")
    made.anchor.mkdir()
    made.mounted.mkdir()
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={DEVICE_BYTES},mode=700", "tmpfs", made.anchor)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).splitlines()[0]
        yield f"no file system can be mounted here: {reason}"
        return
    try:
        made.attach()
        yield made
    finally:
        for path in (made.mounted, made.anchor):
            while os.path.ismount(path):
                _run("umount", "--lazy", path)


@pytest.fixture(scope="module")
def site(
    device: Device | str, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("faults")
    one, two = folder / "one", (folder if isinstance(device, str) else device.mounted) / "two"
    config = folder / "hcache.yaml"
    config.write_text(TIER_CONFIG)
    arguments = [
        *("--model-path", str(tiny_model()), "--dtype", "float32", "--max-total-tokens", "4096"),
        *("--chunked-prefill-size", "512", "--enable-cache-report", "--hcache-io-engine", "posix"),
        *("--hcache-config", str(config), "--hcache-dirs", f"{one},{two}"),
    ]
    server = TierServer(folder, arguments)
    (server.switches / "io_faults").touch()
    with server:
        prompts = [random_prompt(500 + number, 950 - 13 * number) for number in range(CONTEXTS)]
        yield Site(
            server, [Context(prompt, server.recompute(prompt)) for prompt in prompts], one, two, device
        )


@pytest.fixture
def mounted(site: Site) -> Device:
    if isinstance(site.device, str):
        pytest.skip(site.device)
    return site.device


@contextmanager
def under_load(site: Site, seed: int) -> Iterator[Load]:
    """Load before, during and after a fault: the tier recovers by itself, and nothing is left behind."""
    server = site.server
    with DiskUsage(site.directories) as usage:
        with Load(server, site.contexts, clients=CLIENTS, seed=seed) as load:
            load.until_disk_serves()
            yield load
            load.until(lambda: is_well(server), "both directories to be well")
            load.until_disk_serves()
        server.settle()
        wait_for(lambda: is_well(server), "a directory that a slow moment of the machine took out")
    assert 0 < usage.largest <= parse_size(DISK_SIZE)
    server.assert_nothing_left()


def conditions(server: TierServer) -> list[str]:
    return [item["condition"] for item in server.state()["disk"]["directories"]]


def is_well(server: TierServer) -> bool:
    """Whether both directories are used."""
    return set(conditions(server)) == {"healthy"}


class Gains:
    """What a server's counters have gained since this was made."""

    def __init__(self, server: TierServer) -> None:
        self._server = server
        self._before = server.state()["counters"]

    def __call__(self, *names: str) -> bool:
        """Whether each of ``names`` has grown."""
        now = self._server.state()["counters"]
        return all(now.get(name, 0) > self._before.get(name, 0) for name in names)


# -- files that are damaged or gone --------------------------------------------------------------


def test_damaged_segments(site: Site) -> None:
    dice = random.Random(0)
    with under_load(site, seed=1) as load:
        for directory in site.directories:
            gained = Gains(site.server)
            for segment in directory.glob("segment-*.seg"):
                scribble(segment, dice, pieces=12)
            load.until(
                lambda gained=gained: gained("store.chunks_quarantined", "restore.failed"),
                "damage to be seen",
            )


def test_a_damaged_state(site: Site) -> None:
    with under_load(site, seed=2) as load:
        for file in find_states(site):
            scribble(file, random.Random(1), pieces=64)
        load.until_disk_serves(10)


def find_states(site: Site) -> list[Path]:
    return [path for folder in site.directories for path in folder.glob("state.json")]


def scribble(file: Path, dice: random.Random, *, pieces: int) -> None:
    """Random bytes over parts of ``file``, which keeps its size; it may go meanwhile."""
    with suppress(FileNotFoundError), file.open("r+b") as stream:
        size = os.fstat(stream.fileno()).st_size
        for _ in range(pieces):
            at = dice.randrange(max(1, size))
            stream.seek(at)
            stream.write(dice.randbytes(min(5000, size - at)))


@pytest.mark.parametrize("which", [0, 1])
def test_a_deleted_directory(site: Site, which: int) -> None:
    gained = Gains(site.server)
    with under_load(site, seed=3 + which) as load:
        remove(site.directories[which])
        load.until(lambda: gained("store.directory_trips"), "the directory to be missed")
    assert gained("store.directory_recoveries")
    assert newest_segment(site.directories[which])


def remove(directory: Path) -> None:
    """``rm -rf``; again if the server put a file there meanwhile."""
    for _ in range(10):
        if subprocess.run(["rm", "-rf", directory], check=False, capture_output=True).returncode == 0:
            return
    raise AssertionError(f"{directory} cannot be removed")


def test_a_file_in_place_of_a_directory(site: Site) -> None:
    gained = Gains(site.server)
    away = site.one.with_name("away")
    with under_load(site, seed=5) as load:
        site.one.rename(away)
        site.one.write_text("not a directory")
        try:
            load.until(lambda: gained("store.directory_trips"), "the directory to be missed")
            load.until_disk_serves()  # from the other one
        finally:
            put_back(away, site.one)
    assert gained("store.directory_recoveries")


# -- a device that is full, read-only, not there -------------------------------------------------


def test_a_full_device(site: Site, mounted: Device) -> None:
    with under_load(site, seed=6) as load:
        with ballast_in(mounted.mounted) as descriptor:
            load.until(lambda: is_filled(descriptor) and is_left_out(site), "segments in the other one only")
            load.until_disk_serves()
        load.until(lambda: not is_left_out(site), "segments in both")


@contextmanager
def ballast_in(folder: Path) -> Iterator[int]:
    """A file to fill the device with; gone at the end, for the tests that come next."""
    ballast = folder / "ballast"
    try:
        with ballast.open("wb", buffering=0) as stream:
            yield stream.fileno()
    finally:
        ballast.unlink()


def is_filled(descriptor: int) -> bool:
    """Append until nothing fits; True if it was so already."""
    was_full = True
    with suppress(OSError):
        while True:
            os.write(descriptor, bytes(2**20))
            was_full = False
    return was_full


def is_left_out(site: Site) -> bool:
    """Whether the newest segment has no part in the second directory."""
    return newest_segment(site.one) > newest_segment(site.two)


def newest_segment(directory: Path) -> str:
    return max((path.name for path in directory.glob("segment-*.seg")), default="")


def test_a_read_only_device(site: Site, mounted: Device) -> None:
    gained = Gains(site.server)
    with under_load(site, seed=7) as load, mounted.read_only():
        load.until(lambda: conditions(site.server) == ["healthy", "read-only"], "a write to be refused")
        load.until_disk_serves(6)
        load.until(lambda: conditions(site.server) == ["healthy", "read-only"], "it to be no better for that")
    assert gained("store.directory_recoveries")


def test_an_unmounted_device(site: Site, mounted: Device) -> None:
    gained = Gains(site.server)
    with under_load(site, seed=8) as load:
        assert newest_segment(site.two)
        with mounted.detached():
            load.until(lambda: gained("store.directory_trips"), "the device to be missed")
            load.until_disk_serves()
            assert not newest_segment(site.two), "the mount point is not written to"
    assert gained("store.directory_recoveries")


# -- operations that fail or hang ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("switch", "directory", "effects"),
    [
        ("fail_reads", "", ("store.io_errors", "restore.failed")),
        ("short_reads", "1", ("store.chunks_quarantined", "restore.failed")),
        ("fail_writes", "1", ("store.directory_trips", "demote.runs_failed")),
        ("hang_writes", "", ("store.directory_trips", "demote.runs_failed")),
    ],
)
def test_a_device_that_fails_or_hangs(
    site: Site, switch: str, directory: str, effects: tuple[str, ...]
) -> None:
    gained = Gains(site.server)
    with under_load(site, seed=10 + len(switch)) as load, site.server.switched_on(switch, directory):
        load.until(lambda: gained(*effects), " and ".join(effects))
        load.until_served(2 * CLIENTS)
    assert gained("store.directory_recoveries") or not gained("store.directory_trips")
    assert gained("store.corrupt_extents") == (switch == "short_reads"), (
        "what was given up lands on nothing else"
    )


def test_reads_that_end_long_after_their_deadline(site: Site) -> None:
    """Late bytes arrive while other restores wait with what they have read: in nobody's buffer."""
    server = site.server
    with under_load(site, seed=30) as load, server.switched_on("slow_restore"):
        for directory in ("0", "1", "0"):
            gained = Gains(server)
            with server.switched_on("hang_reads", directory):
                load.until(
                    lambda gained=gained: gained("store.directory_trips", "restore.failed"),
                    "a read to be given up",
                )
                load.until(lambda: server.state()["in_flight_tokens"] > 0, "another restore")
            load.until(lambda gained=gained: gained("store.directory_recoveries"), "the reads to end")


# -- the end of it all ---------------------------------------------------------------------------


def test_killed_under_load_and_the_state_lost(site: Site) -> None:
    server = site.server
    with Load(server, site.contexts, clients=CLIENTS, seed=40) as load:
        load.until_disk_serves()
        load.expect_death()
        server.process.kill()
    for file in find_states(site):
        scribble(file, random.Random(2), pieces=64)
    with DiskUsage(site.directories) as usage:
        server.process.start()
        started = server.state()["counters"]
        assert started["store.runs_recovered"] > 0
        with Load(server, site.contexts, clients=CLIENTS, seed=41) as load:
            load.until_disk_serves(10)
    assert 0 < usage.largest <= parse_size(DISK_SIZE)
    server.assert_nothing_left()


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
