"""From rows of forward passes to sealed chunks: capture, staging and assembler together."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import islice
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hcache.capture import passes
from sglang_hcache.capture.events import RequestBegins, RequestEnds, RequestRows
from sglang_hcache.core.keys import Namespace, chunk_keys
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, StateLayout
from sglang_hcache.device.kv_gather import TorchGather
from tests.unit.capture.save_parts import SaveParts
from tests.waiting import wait_until

WIDTHS = (8, 4, 4)
LAYERS = len(WIDTHS)
LAYOUT = StateLayout.of((Method.KV, Method.HIDDEN, Method.HIDDEN), hidden_row_bytes=16, kv_row_bytes=32)
NAMESPACE = Namespace(model=b"m", layout="test")


class SavePath(SaveParts):
    """Plays the serving thread: forward passes whose hidden states say which request and position they are."""

    def __init__(self, slots: int = 64, rows: int = 512) -> None:
        super().__init__(LAYOUT, slots, rows)
        self.passes = self.capture()

    def begin(self, rid: str, prefix: list[int], tenant: str | None = None) -> None:
        self.assembler.publish(RequestBegins(rid, Namespace(b"m", "test", tenant), array("q", prefix)))

    def end(self, rid: str | None) -> None:
        self.assembler.publish(RequestEnds(rid))

    def forward(
        self, parts: list[tuple[str, int, list[int]]], *, layers: int = LAYERS, can_wait: bool = False
    ) -> None:
        """One pass over (request, first position, tokens) parts."""
        tokens = array("q", [token for _, _, part in parts for token in part])
        of_rows = torch.frombuffer(tokens, dtype=torch.int64)
        self.passes.begin(of_rows, of_rows)
        for layer in range(layers):
            rows = [state(layer, position + i, t) for _, position, part in parts for i, t in enumerate(part)]
            self.passes.on_layer(layer, torch.stack(rows))
        requests, row = [], 0
        for rid, position, part in parts:
            requests.append(RequestRows(rid, position, row, len(part)))
            row += len(part)
        self.passes.end(requests, is_replayed=False, is_prefill=not can_wait)

    def settle(self) -> None:
        """Until everything so far is saved, and requests that have begun are open."""
        self.end("nobody")  # what begins waits for another event
        wait_until(lambda: not self.assembler.is_busy, step_s=0.001)

    def finish(self) -> None:
        self.assembler.close()

    def sealed(self, tokens: list[int], tenant: str | None = None) -> list[bool]:
        """Which chunks of ``tokens`` are stored; those that are hold the right rows."""

        def right(layer: int, first: int, end: int) -> torch.Tensor:
            return torch.stack([state(layer, p, tokens[p]) for p in range(first, end)])

        found = list(self.chunks(Namespace(b"m", "test", tenant), tokens, right))
        assert not any(found), "layers with wrong rows"
        return [wrong is not None for wrong in found]


def state(layer: int, position: int, token: int) -> torch.Tensor:
    values = [layer, position, token, layer * 1e4 + position * 10 + token]
    return torch.tensor(values * (WIDTHS[layer] // 4), dtype=torch.float32)


@pytest.fixture
def path() -> Iterator[SavePath]:
    made = SavePath()
    yield made
    made.finish()


def test_a_prompt_in_pieces_and_its_decoded_tokens(path: SavePath) -> None:
    tokens = list(range(300))
    path.begin("a", [])
    path.forward([("a", 0, tokens[:100])])
    path.forward([("a", 100, tokens[100:190])])
    for position in range(190, 260):
        path.forward([("a", position, [tokens[position]])])
    path.end("a")
    path.finish()
    assert path.sealed(tokens) == [True, True, True, True]


def test_decoded_rows_that_can_wait_wake_nobody(path: SavePath, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, handed_over = list(range(250)), []
    hand_over = path.assembler._hand_over
    monkeypatch.setattr(path.assembler, "_hand_over", lambda: handed_over.append(position) or hand_over())
    position = 0
    path.begin("a", [])
    path.forward([("a", 0, tokens[:70])])
    for position in range(70, 128):
        # A ring of 512 rows holds more than these.
        path.forward([("a", position, [tokens[position]])], can_wait=position < 127 and position != 90)
    # With the prompt, when something cannot wait, when 32 rows wait.
    assert handed_over == [0, 90, 122, 127]
    for position in range(128, 140):
        path.forward([("a", position, [tokens[position]])], can_wait=True)
    path.end("a")
    assert handed_over[4:] == [139]
    path.settle()
    path.begin("b", tokens[:140])
    path.forward([("b", 140, tokens[140:])])
    path.finish()
    assert path.sealed(tokens) == [True] * 3


def test_rows_that_wait_are_saved_at_the_end(path: SavePath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "complete_no_chunk", lambda _: True)
    path.begin("a", [])
    path.forward([("a", 0, list(range(63)))])
    path.forward([("a", 63, [63])], can_wait=True)
    path.finish()
    assert path.sealed(list(range(64))) == [True]


def test_requests_share_passes_and_keep_their_rows_apart(path: SavePath) -> None:
    one, two = [1] * 130, [2] * 130
    path.begin("a", [], tenant="x")
    path.begin("b", [], tenant="y")
    path.forward([("a", 0, one[:70]), ("b", 0, two[:129])])
    path.forward([("b", 129, two[129:]), ("stranger", 5, [9]), ("a", 70, one[70:])])
    path.finish()
    assert path.sealed(one, "x") == [True, True]
    assert path.sealed(two, "y") == [True, True]
    assert path.sealed(one) == [False, False]


def test_a_chunk_goes_behind_the_one_before_it_where_that_slot_is_free(path: SavePath) -> None:
    texts = {rid: [number] * 5 * CHUNK_TOKENS for number, rid in enumerate("ab")}
    for rid, text in texts.items():
        path.begin(rid, [])
        path.forward([(rid, 0, text[: 2 * CHUNK_TOKENS])])
    path.settle()
    for rid, text in reversed(texts.items()):
        path.end(rid)
        path.begin(rid, text[: 2 * CHUNK_TOKENS])
        path.forward([(rid, 2 * CHUNK_TOKENS, text[2 * CHUNK_TOKENS :])])
    path.finish()
    for text, slots in zip(texts.values(), ([0, 1, 7, 8, 9], [2, 3, 4, 5, 6]), strict=True):
        keys = chunk_keys(NAMESPACE.root_key(), text)
        assert [path.tiers.host.slot_of(key) for key in keys] == slots


def test_chunks_of_one_pass_follow_each_other(path: SavePath) -> None:
    host, tokens = path.tiers.host, list(range(3 * CHUNK_TOKENS))
    for slot in [host.reserve(), host.reserve()]:
        assert slot is not None
        host.release(slot)
    path.begin("a", [])
    path.forward([("a", 0, tokens)])
    path.finish()
    keys = chunk_keys(NAMESPACE.root_key(), tokens)
    assert [host.slot_of(key) for key in keys] == [1, 2, 3]


def test_a_request_that_starts_on_a_cached_prefix(path: SavePath) -> None:
    tokens = list(range(200))
    path.begin("a", tokens[:128])
    path.forward([("a", 128, tokens[128:])])
    path.finish()
    assert path.sealed(tokens) == [False, False, True]


def test_ended_requests_leave_nothing(path: SavePath) -> None:
    path.begin("a", [])
    path.begin("b", [])
    path.forward([("a", 0, [1] * 40), ("b", 0, [2] * 40)])
    path.end("a")
    path.forward([("a", 40, [1] * 40), ("b", 40, [2] * 40)])  # a: after its end
    path.end(None)
    path.finish()
    assert path.assembler.open_requests == 0
    assert path.tiers.host.counts() == (63, 1, 0)
    assert path.sealed([2] * 64) == [True]


def test_a_request_id_that_is_used_again_starts_afresh(path: SavePath) -> None:
    path.begin("a", [])
    path.forward([("a", 0, [1] * 40)])
    path.begin("a", [])
    path.forward([("a", 0, [3] * 64)])
    path.finish()
    assert path.sealed([3] * 64) == [True]


def test_a_gap_in_the_positions_ends_the_request(path: SavePath) -> None:
    path.begin("a", [])
    path.forward([("a", 0, [1] * 40)])
    path.forward([("a", 41, [1] * 87)])
    path.finish()
    assert path.counters["capture.requests_out_of_order"] == 1
    assert path.sealed([1] * 128) == [False, False]


def test_rows_behind_a_gap_do_not_fill_the_chunk_before_it(path: SavePath) -> None:
    path.begin("a", [])
    path.forward([("a", 0, [1] * 40)])
    path.forward([("a", 41, [1] * 87)])
    path.forward([("a", 40, [2] * 24)])
    path.finish()
    assert path.sealed([1] * 40 + [2] * 24) == [False]


def test_a_full_staging_ring_drops_rows_counts_them_and_goes_on() -> None:
    path = SavePath(rows=100)
    tokens = list(range(256))
    path.begin("a", [])
    path.forward([("a", 0, tokens[:192])])  # rows 100 to 191 do not fit
    path.finish()
    assert path.counters["capture.rows_dropped_staging_full"] == 92
    assert path.counters["capture.chunks_dropped_staging_full"] == 1
    assert path.counters["capture.chunks_dropped_behind_another"] == 1
    assert path.sealed(tokens[:192]) == [True, False, False]


def test_nothing_is_saved_behind_a_chunk_that_was_dropped() -> None:
    """No look-up would find it, and it would take the place of what one does."""
    path = SavePath(rows=64, slots=8)
    tokens = list(range(256))
    path.begin("a", [])
    path.forward([("a", 0, tokens[:128])])
    for first in (128, 192):
        path.settle()
        path.forward([("a", first, tokens[first : first + 64])])
    path.finish()
    assert path.sealed(tokens) == [True, False, False, False]
    assert path.tiers.host.counts() == (7, 1, 0)
    assert path.counters["capture.chunks_dropped_behind_another"] == 2


def test_the_chain_of_keys_survives_dropped_rows() -> None:
    """Where an earlier request saved the chunk that was dropped, what follows is found behind it."""
    path = SavePath(rows=64)
    tokens = list(range(256))
    path.begin("a", [])
    path.forward([("a", 0, tokens[:64])])
    path.settle()
    path.forward([("a", 64, tokens[64:128])])
    path.settle()
    path.begin("b", [])
    path.forward([("b", 0, tokens[:128])])
    path.settle()
    path.forward([("b", 128, tokens[128:192])])
    path.finish()
    assert path.counters["capture.rows_dropped_staging_full"] == 64
    assert path.sealed(tokens[:192]) == [True, True, True]


def test_a_dropped_chunk_that_another_request_ends_in_the_same_pass_leaves_no_gap() -> None:
    path = SavePath(rows=64)
    for rid in "ab":
        path.begin(rid, [])
    path.forward([("a", 0, [1] * 63), ("b", 0, [1] * 63)])
    path.settle()
    path.forward([("a", 63, [1]), ("b", 63, [1])])
    path.settle()
    path.forward([("b", 64, [2] * 64)])
    path.finish()
    assert path.counters["capture.chunks_dropped_staging_full"] == 1
    assert path.sealed([1] * 64 + [2] * 64) == [True, True]


def test_a_full_host_tier_drops_chunks_counts_them_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    path = SavePath(slots=1)
    path.begin("a", [])
    path.begin("b", [])
    path.forward([("a", 0, [1] * 10), ("b", 0, [2] * 64)])
    path.finish()
    assert path.counters["capture.chunks_dropped_host_full"] == 1
    assert "host memory is full, so chunks are not saved" in caplog.text
    assert "--hcache-host-size" in caplog.text
    assert path.sealed([2] * 64) == [False]


def test_of_requests_that_ended_the_tail_goes_first() -> None:
    path = SavePath(slots=6)
    first, second, third = ([number] * 192 for number in (1, 2, 3))
    path.begin("a", [])
    path.begin("b", [])
    for position in (0, 64, 128):
        path.forward([("a", position, first[:64]), ("b", position, second[:64])])
    path.end(None)
    path.begin("c", [])
    path.forward([("c", 0, third[:128])])
    path.finish()
    assert path.sealed(first) == [True, False, False]
    assert path.sealed(second) == [True, True, True]
    assert not any(path.tiers.host.is_reused(key) for key in path.tiers.host._entries)


def test_a_pass_that_saw_too_few_layers_is_not_used(path: SavePath) -> None:
    path.begin("a", [])
    path.forward([("a", 0, [1] * 64)], layers=LAYERS - 1)
    path.finish()
    assert path.sealed([1] * 64) == [False]
    assert path.counters["capture.rows_dropped_incomplete"] == 64
    assert path.counters["capture.chunks_dropped_incomplete"] == 1
    assert not path.counters["capture.chunks_dropped_staging_full"], "more memory would not help"
    assert path.ring.reserve(path.ring.num_rows) is not None


def test_chunks_that_were_computed_though_they_are_on_disk_come_to_host_memory(
    path: SavePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read them would have been slower, and will be again."""
    monkeypatch.setattr(type(path.tiers), "_is_on_disk", lambda _, _key: True)
    tokens = list(range(192))
    path.begin("a", [])
    path.forward([("a", 0, tokens)])
    path.end("a")
    path.settle()
    assert path.sealed(tokens) == [True] * 3


def test_chunks_that_are_stored_already_are_not_copied_again(path: SavePath) -> None:
    tokens = list(range(64))
    for rid in ("a", "b"):
        path.begin(rid, [])
        path.forward([(rid, 0, tokens)])
    path.finish()
    assert path.counters["host.chunks_sealed"] == 1
    assert path.counters["host.duplicate_chunks"] == 0
    assert path.tiers.host.counts() == (63, 1, 0)


def test_the_slot_of_a_chunk_that_another_request_ended_first_is_the_next_ones() -> None:
    path = SavePath(slots=3)
    tokens = [1] * 192
    for rid in "ab":
        path.begin(rid, [])
    path.forward([("a", 0, tokens[:10])])
    path.forward([("b", 0, tokens[:64])])
    path.forward([("a", 10, tokens[10:])])
    path.finish()
    assert path.sealed(tokens) == [True] * 3
    assert path.counters["host.duplicate_chunks"] == 1
    assert path.counters["host.chunks_evicted"] == 0


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_any_interleaving_of_requests_and_piece_sizes(seed: int) -> None:
    random = Random(seed)
    path = SavePath(rows=2048)  # more than all have together
    names = ["a", "b", "c"]
    numbers = iter(random.sample(range(10_000), 900))
    tokens = {name: list(islice(numbers, random.randint(1, 300))) for name in names}
    done = dict.fromkeys(names, 0)
    for name in names:
        path.begin(name, [])
    while any(done[name] < len(tokens[name]) for name in names):
        parts = []
        random.shuffle(names)
        for name in names:
            count = min(random.randint(0, 300), len(tokens[name]) - done[name])
            if count:
                parts.append((name, done[name], tokens[name][done[name] : done[name] + count]))
                done[name] += count
        if parts:
            path.forward(parts)
    path.finish()
    assert not path.counters["capture.rows_dropped_staging_full"]
    assert path.ring.reserve(path.ring.num_rows) is not None, "no row is kept"
    for name in names:
        assert path.sealed(tokens[name]) == [True] * (len(tokens[name]) // CHUNK_TOKENS)


def test_k_and_v_are_stored_side_by_side() -> None:
    path = SavePath()
    path.begin("a", [])
    tokens = list(range(CHUNK_TOKENS))
    rows = [torch.stack([state(layer, p, t) for p, t in enumerate(tokens)]) for layer in range(LAYERS)]
    slots = torch.randperm(CHUNK_TOKENS, generator=torch.Generator().manual_seed(0))
    written = torch.empty_like(rows[0])
    written[slots] = rows[0]
    half = WIDTHS[0] // 2

    class Pool:
        def buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            assert layer == 0
            return written[:, None, :half], written[:, None, half:]

    capture = path.capture(LAYOUT.methods, TorchGather(Pool()))  # type: ignore[arg-type]
    capture.begin(torch.tensor(tokens), slots)
    for layer in range(1, LAYERS):
        capture.on_layer(layer, rows[layer])
    capture.end([RequestRows("a", 0, 0, len(tokens))], is_replayed=False)
    path.finish()
    assert path.sealed(tokens) == [True]


def test_of_a_request_that_runs_for_long_the_head_stays_longest() -> None:
    """Others come and go meanwhile, and no more run at a time than a third of host memory holds."""
    path = SavePath(slots=24)
    prompt = [position % 251 for position in range(6 * CHUNK_TOKENS)]
    path.begin("long", [])
    path.forward([("long", 0, prompt[: 4 * CHUNK_TOKENS])])
    for number in range(64):
        path.begin("short", [])
        piece = 4 * CHUNK_TOKENS + 2 * number
        path.forward([("short", 0, [number] * CHUNK_TOKENS), ("long", piece, prompt[piece : piece + 2])])
        path.settle()
    assert path.sealed(prompt) == [True] * 6
    path.finish()


def test_with_a_disk_the_head_is_written_first() -> None:
    """Also while its request runs: a tail on disk whose head is not there is of no use."""
    path = SavePath(slots=64)
    path.tiers.host.keep_dirty = True
    prompt = [position % 251 for position in range(32 * CHUNK_TOKENS)]
    path.begin("long", [])
    for piece in range(0, len(prompt), 4 * CHUNK_TOKENS):
        path.forward([("long", piece, prompt[piece : piece + 4 * CHUNK_TOKENS])])
        path.settle()
    assert [info.index for info in path.tiers.host.oldest_dirty(32)] == list(range(32))
    path.finish()


def test_of_a_prompt_larger_than_host_memory_the_head_stays() -> None:
    path = SavePath(slots=8)
    prompt = [position % 251 for position in range(12 * CHUNK_TOKENS)]
    path.begin("a", [])
    for piece in range(0, len(prompt), 2 * CHUNK_TOKENS):
        path.forward([("a", piece, prompt[piece : piece + 2 * CHUNK_TOKENS])])
        path.settle()
    found = path.sealed(prompt)
    assert found[:6] == [True] * 6, found
    path.finish()
