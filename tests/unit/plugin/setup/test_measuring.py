"""What is measured before serving, however short the time for it."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_hcache.core.layout import Method
from sglang_hcache.core.observer import Counters
from sglang_hcache.device.copies import Spans
from sglang_hcache.plan.curves import CostCurve
from sglang_hcache.restore.rows import StoredRows
from sglang_hcache.restore.stage import DeviceStage, StageSizes
from sglang_hcache.sglang_plugin.seam.ranks import Alone
from sglang_hcache.sglang_plugin.setup import measuring
from sglang_hcache.sglang_plugin.setup.measuring import Bench
from sglang_hcache.sglang_plugin.setup.scratch import NUM_LAYERS, ScratchReads
from sglang_hcache.sglang_plugin.setup.timing import range_of
from sglang_hcache.store import DiskStore
from sglang_hcache.store.io.engine import IOKind
from sglang_hcache.store.io.posix import PosixEngine
from sglang_hcache.testing.io_faults import FaultEngine, always
from sglang_hcache.testing.stored_chunks import small_config
from sglang_hcache.tier.tiered import DISK, HOST
from tests.unit.restore.delayed_streams import DelayedStreams

LAYERS = 2


class Forward:
    """A device of which passes take time as attention does. It remembers what it was asked to compute."""

    def __init__(self) -> None:
        self.tree = self.forward = self
        self.pieces: list[tuple[int, int]] = []
        self.now = 0.0

    def allocate(self, count: int) -> torch.Tensor:
        return torch.arange(count)

    def free(self, slots: torch.Tensor) -> None:
        pass

    def extend(self, tokens: array[int], slots: torch.Tensor, start: int, num_layers: int) -> float:
        assert (len(slots), num_layers) == (len(tokens), LAYERS)
        self.pieces.append((len(tokens) - start, start))
        seconds = 1e-9 * (len(tokens) ** 2 - start**2)
        self.now += seconds
        return seconds


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> Forward:
    """Whose time is all that passes."""
    made = Forward()
    monkeypatch.setattr(measuring, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


class Ranks(Alone):
    """One, by whose clock only passes take time."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def now(self) -> float:
        return self._forward.now


def bench(
    forward: Forward,
    longest: int,
    budget_s: float,
    context: int = 10_000,
    stage: object = None,
    is_exact: bool = True,
) -> Bench:
    shape = SimpleNamespace(num_layers=LAYERS)
    model = SimpleNamespace(vocabulary=100, context_length=context, shape=shape, ranks=Ranks(forward))
    restorer = SimpleNamespace(stage=stage)
    return Bench(
        *(model, restorer, forward, None, longest, budget_s, "here"),  # type: ignore[arg-type]
        hidden=True,
        is_exact=is_exact,
    )


def never_clear(_count: int) -> float:
    """Restoring takes longer than any pass."""
    return 1e6


@pytest.mark.parametrize("longest", [256, 512, 1024, 8192])
@pytest.mark.parametrize("budget_s", [0.1, 0.2])
def test_a_piece_behind_a_prefix_is_measured_in_any_case(
    longest: int, budget_s: float, forward: Forward
) -> None:
    curve = measuring._pass_curve(bench(forward, longest, budget_s)._pass_times(never_clear))
    expected = [] if 1.25 * longest > 10_000 else [(longest // 4, longest)]
    assert [piece for piece in dict.fromkeys(forward.pieces) if piece[1]] == expected
    assert {(64, 0), (128, 0), (256, 0)} <= set(forward.pieces)
    assert curve.seconds(longest, longest) > 0


@pytest.mark.parametrize(
    ("restored_s", "is_exact", "longest_pass"),
    [(0.0, False, 64), (0.0, True, 4096), (6e-9, False, 64), (7e-9, False, 4096)],
)
def test_where_restoring_is_much_faster_short_passes_say_enough(
    restored_s: float, is_exact: bool, longest_pass: int, forward: Forward
) -> None:
    """A chunk takes 4 us, 8,192 tokens 67 ms."""
    measured = bench(forward, 8192, 0.2, context=20_000, is_exact=is_exact)
    passes = measured._pass_times(lambda count: restored_s * count)
    assert range_of(passes) == (64 if longest_pass > 64 else 16, longest_pass)
    exact = {(2048, 8192)} if longest_pass > 64 else set()
    short = set() if is_exact else {(64, 8192)}
    assert {piece for piece in forward.pieces if piece[1]} == exact | short
    assert measuring._pass_curve(passes).seconds(8192, 8192) > 0


def test_a_short_restore_that_is_not_much_faster_is_not_clear(forward: Forward) -> None:
    passes = bench(forward, 8192, 0.2, context=20_000, is_exact=False)._pass_times(
        lambda count: 5e-7 + 1e-12 * count
    )
    assert range_of(passes) == (64, 4096)


@pytest.mark.parametrize("budgets", [0.1, 0.9, 1.0, 1.5, 1.74, 1.76, 1.9, 1.99, 2.01, 3.0, 10.0, 100.0])
@pytest.mark.parametrize("longest", [256, 8192])
def test_however_long_the_shortest_pass_takes_a_curve_can_be_fitted(
    budgets: float, longest: int, forward: Forward
) -> None:
    shortest_s = 1e-9 * 64**2
    passes = bench(forward, longest, shortest_s / budgets, context=20_000)._pass_times(never_clear)
    assert len([length for length, start in passes if not start]) >= 3
    assert measuring._pass_curve(passes).seconds(longest, longest) > 0


def test_passes_that_take_too_long_are_left_out(forward: Forward) -> None:
    """64 tokens take 4 us, 1,024 at least 16 times that."""
    bench(forward, 8192, 5e-6, context=20_000)._pass_times(never_clear)
    assert set(forward.pieces) == {(64, 0), (128, 0), (256, 0), (128, 8192)}


def test_pauses_during_short_passes_do_not_hide_what_a_token_costs(
    forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that starts other servers at the same time."""
    pauses_s = {(64, 0): 2.0, (128, 0): 2.0, (256, 0): 0.2, (128, 512): 2.0}

    def paused(tokens: array[int], slots: torch.Tensor, start: int, num_layers: int) -> float:
        length = len(tokens) - start
        return 0.03 + 0.0015 * length + pauses_s.get((length, start), 0.0)

    monkeypatch.setattr(forward, "extend", paused)
    curve = measuring._pass_curve(bench(forward, 512, 3.0)._pass_times(never_clear))
    assert curve.seconds(1024) - curve.fixed_s > 0.5 * (0.0015 * 1024)


@pytest.mark.parametrize(("longest", "context"), [(8192, 32_768), (5216, 32_768), (4096, 4096)])
def test_launching_short_passes_is_not_taken_for_what_a_token_costs(
    longest: int, context: int, forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama-2-13B's shape on an H200: the CPU launches 40 layers in 65 ms, the device computes 1,000 tokens in 50. By
    short passes alone 4,096 tokens were predicted to take 70 ms, nearly all of it whatever the length: no restore of
    32 ms would have been started.
    """

    def launched(tokens: array[int], slots: torch.Tensor, start: int, num_layers: int) -> float:
        length = len(tokens) - start
        seconds = max(0.065, 48e-6 * length + 4e-10 * (len(tokens) ** 2 - start**2))
        forward.now += seconds + (0.0 if (length, start) in forward.pieces else 0.4)  # kernels are loaded
        forward.pieces.append((length, start))
        return seconds

    monkeypatch.setattr(forward, "extend", launched)
    curve = measuring._pass_curve(
        bench(forward, longest, 0.3, context, stage=object())._pass_times(never_clear)
    )
    assert curve.seconds(4096) == pytest.approx(0.203, rel=0.1)
    assert curve.seconds(4096) - curve.fixed_s > 0.16
    if context > 16384:
        assert curve.seconds(16384) == pytest.approx(0.894, rel=0.15)


class SlowBus:
    """A device that copies come to at one speed, however they are cut."""

    def __init__(self, clock: Forward, seconds_per_byte: float) -> None:
        self._clock = clock
        self._seconds_per_byte = seconds_per_byte
        self._ends = 0.0

    def rows_at_once(self, row_bytes: int) -> int:
        return 2048

    def host_rows(self, count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.ones(count, width, dtype=dtype)

    def bring(self, stored: list[StoredRows]) -> SlowBus:
        for of_layer in stored:
            seconds = self._seconds_per_byte * of_layer.memory.nbytes
            self._ends = max(self._ends, self._clock.now) + seconds
        return self

    def wait(self) -> None:
        self._clock.now = max(self._clock.now, self._ends)


@pytest.mark.parametrize(("seconds_per_byte", "is_slower"), [(1e-6, True), (1e-12, False)])
def test_a_tier_is_as_slow_as_the_way_to_the_device(
    forward: Forward, seconds_per_byte: float, is_slower: bool
) -> None:
    read = CostCurve(fixed_s=0.0, per_token_s=1e-6)
    shape = SimpleNamespace(num_layers=LAYERS)
    model = SimpleNamespace(row_dtype=torch.float32, row_bytes=lambda _: 8, shape=shape)
    restorer = SimpleNamespace(stage=SlowBus(forward, seconds_per_byte))
    measured = Bench(model, restorer, forward, None, 512, 0.2, "here", True, True)  # type: ignore[arg-type]
    found = measured._with_bus(Method.KV, read).per_token_s
    assert found == pytest.approx(8e-6 if is_slower else read.per_token_s)  # 8 bytes a token
    restorer.stage = None
    assert measured._with_bus(Method.KV, read) == read


def test_host_memory_is_as_fast_as_the_way_to_the_device(
    forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restores copy from where rows lie: nothing is read into other memory to find out how long that takes."""
    shape = SimpleNamespace(num_layers=LAYERS, hidden_row_bytes=4, kv_row_bytes=8)
    model = SimpleNamespace(row_dtype=torch.float32, row_bytes=lambda _: 8, shape=shape)
    restorer = SimpleNamespace(stage=SlowBus(forward, 1e-6))
    measured = Bench(model, restorer, forward, None, 256, 0.01, "here", True, True)  # type: ignore[arg-type]
    monkeypatch.setattr(measuring, "ScratchReads", None)
    with ExitStack() as holds:
        assert measured._tiers(holds)[HOST].kv.per_token_s == pytest.approx(8e-6)  # 8 bytes a token


class SlowCalls(DelayedStreams):
    """To ask for a copy takes a millisecond."""

    def __init__(self, clock: Forward) -> None:
        super().__init__()
        self._clock = clock

    def copy_rows(self, into: torch.Tensor, sources: Sequence[torch.Tensor], spans: Spans) -> None:
        self._clock.now += 0.001
        super().copy_rows(into, sources, spans)


def test_k_and_v_of_several_layers_are_one_copy(forward: Forward) -> None:
    """So more bytes may come sooner, where they are few."""
    stage = DeviceStage(SlowCalls(forward), StageSizes(6 * 512 * 8, 8), 1)
    shape = SimpleNamespace(num_layers=36, hidden_row_bytes=4, kv_row_bytes=8)
    sizes = {Method.HIDDEN: 4, Method.KV: 8}
    model = SimpleNamespace(row_dtype=torch.float32, row_bytes=sizes.__getitem__, shape=shape)
    restorer = SimpleNamespace(stage=stage)
    measured = Bench(model, restorer, forward, None, 512, 0.2, "here", True, True)  # type: ignore[arg-type]
    with ExitStack() as holds:
        curves = measured._tiers(holds)[HOST]
    assert (curves.hidden.fixed_s, curves.kv.fixed_s) == pytest.approx((0.001, 0.001 / 6))


def test_layers_are_restored_as_a_model_has_them(forward: Forward) -> None:
    """One behind the other: a GPU writes K and V of several at once."""
    seen: list[int] = []
    measured = bench(forward, 64, 0.2)
    measured.model.row_dtype, measured.model.row_bytes = torch.float32, lambda _: 8  # type: ignore[misc, assignment]
    measured.restorer.positions = torch.arange  # type: ignore[method-assign, assignment]
    measured.restorer.fence = measured.restorer.after = lambda *_: None  # type: ignore[method-assign]
    measured.restorer.start = lambda stored, *_: seen.extend(rows.layer for rows in stored) or []  # type: ignore
    measured._restore_one(Method.KV, 64, 3 * LAYERS)
    assert seen == [0, 1] * 3


class Reads:
    """Takes 20 ms, or so long for each token."""

    longest = 512

    def __init__(self, clock: Forward, per_token_s: float | None = None) -> None:
        self._clock = clock
        self._per_token_s = per_token_s
        self.lengths: list[int] = []

    def time(self, length: int) -> None:
        self._clock.now += 0.02 if self._per_token_s is None else length * self._per_token_s
        self.lengths.append(length)


class Beside:
    """In place of a thread: what is submitted takes its time at once, or beside what is done meanwhile."""

    def __init__(self, clock: Forward, share_a_core: bool) -> None:
        self._clock = clock
        self._shares_a_core = share_a_core

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work: Callable[..., object], *arguments: object) -> SimpleNamespace:
        began = self._clock.now
        work(*arguments)
        ends = self._clock.now
        if not self._shares_a_core:
            self._clock.now = began

        def wait() -> None:
            self._clock.now = max(self._clock.now, ends)

        return SimpleNamespace(result=wait)


@pytest.mark.parametrize("share_a_core", [True, False])
@pytest.mark.parametrize("layer_s", [0.005, 0.5])
def test_reading_and_restoring_at_once(
    layer_s: float, share_a_core: bool, forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored: list[Method] = []

    def restore_one(_bench: Bench, method: Method, length: int, num_layers: int) -> float:
        restored.append(method)
        seconds = layer_s * length / 512
        forward.now += num_layers * seconds
        return seconds

    monkeypatch.setattr(Bench, "_restore_one", restore_one)
    monkeypatch.setattr(measuring, "ThreadPoolExecutor", lambda *_, **__: Beside(forward, share_a_core))
    for hidden, method in ((True, Method.HIDDEN), (False, Method.KV)):
        restorer = SimpleNamespace(stage=None)
        measured = Bench(None, restorer, forward, None, 1024, 0.2, "here", hidden, True)  # type: ignore[arg-type]
        read_curve = CostCurve(fixed_s=0.02 / NUM_LAYERS, per_token_s=0.0)
        contention = measured._contention(Reads(forward), read_curve)  # type: ignore[arg-type]
        assert contention == pytest.approx(float(share_a_core))
        assert set(restored) == {method}
        restored.clear()


@pytest.mark.parametrize(("token_s", "length"), [(0.01, 64), (0.0005, 192), (0.0001, 512)])
def test_a_slow_disk_is_not_read_for_long_to_see_what_goes_on_beside(
    token_s: float, length: int, forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """63 MB are: four times that from a disk of 10 MB/s would be half a minute of each start."""

    def restore_one(_bench: Bench, method: Method, length: int, num_layers: int) -> float:
        forward.now += num_layers * 1e-6 * length
        return 1e-6 * length

    monkeypatch.setattr(Bench, "_restore_one", restore_one)
    monkeypatch.setattr(measuring, "ThreadPoolExecutor", lambda *_, **__: Beside(forward, True))
    restorer = SimpleNamespace(stage=None)
    measured = Bench(None, restorer, forward, None, 1024, 0.2, "here", True, True)  # type: ignore[arg-type]
    reads = Reads(forward, token_s)
    measured._contention(reads, CostCurve(per_token_s=token_s / NUM_LAYERS))  # type: ignore[arg-type]
    assert set(reads.lengths) == {length}
    assert forward.now < max(8 * 64 * token_s, 5 * measured.budget_s)


def fill_nothing(_scratch: ScratchReads, _disk: DiskStore) -> None:
    """The chunks are gone before they are read."""


def demoters() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "hcache-demoter"}


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize(
    ("fails", "complaint"),
    [(None, None), (IOKind.READ, "read failed"), (IOKind.WRITE, "error"), ("gone", "tier")],
)
def test_a_disk_that_cannot_be_measured_is_left_out(
    fails: IOKind | str | None,
    complaint: str | None,
    hidden: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FaultEngine(PosixEngine(2, 1), lambda op, number: None)
    disk = DiskStore.open(small_config(tmp_path), Counters(), engine)
    monkeypatch.setattr(Bench, "_restore_one", lambda *_: 1e-3)
    written: list[Method] = []
    monkeypatch.setattr(
        measuring, "ScratchReads", lambda method, *rest: written.append(method) or ScratchReads(method, *rest)
    )
    if isinstance(fails, IOKind):
        engine.decide = always(fails)
    elif fails == "gone":
        monkeypatch.setattr(ScratchReads, "_fill_disk", fill_nothing)
    shape = SimpleNamespace(num_layers=LAYERS, hidden_row_bytes=64, kv_row_bytes=128)
    model = SimpleNamespace(shape=shape, row_bytes=lambda method: 128 if method is Method.KV else 64)
    restorer = SimpleNamespace(stage=None)
    measured = Bench(model, restorer, Forward(), disk, 512, 0.05, "here", hidden, True)  # type: ignore[arg-type]
    before = demoters()
    try:
        with ExitStack() as scratch:
            tiers = measured._tiers(scratch)
        assert demoters() == before, "nothing goes on when it is measured"
        left = disk.stats()
    finally:
        disk.close()
    assert (left.chunks, left.segments) == (0, 0), "what was written to be measured is gone"
    assert set(tiers) == ({HOST} if fails else {HOST, DISK})
    assert set(written) == ({Method.HIDDEN, Method.KV} if hidden else {Method.KV})
    assert all(curves.hidden == curves.kv for curves in tiers.values()) or hidden
    said = [record.message for record in caplog.records if "could not be measured" in record.message]
    assert len(said) == bool(fails)
    assert all(complaint in text for text in said if complaint)


@pytest.mark.parametrize(
    ("budget_s", "times"), [(0.016, 1), pytest.param(0.02, 2, id="the shorter one counts")]
)
def test_what_takes_long_is_not_repeated_for_long(budget_s: float, times: int, forward: Forward) -> None:
    bench(forward, 4096, budget_s)._pass_times(never_clear)  # the piece behind a prefix takes 9 ms
    assert forward.pieces.count((1024, 4096)) == times


def test_no_longer_than_the_model_allows(forward: Forward) -> None:
    bench(forward, 512, 1e-6, context=512)._pass_times(never_clear)
    assert max(length + start for length, start in forward.pieces) <= 512
