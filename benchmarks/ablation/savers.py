"""Ways to save the hidden states of a forward pass: in two stages, or written directly."""

from __future__ import annotations

import hashlib
import os
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from ablation.row_places import places
from restoring.counted_disk import open_disk
from restoring.rig import Rig
from sglang_hcache.capture.assembler import Assembler
from sglang_hcache.capture.copiers import Copiers
from sglang_hcache.capture.events import RequestBegins, RequestEnds, RequestRows
from sglang_hcache.capture.passes import PassCapture
from sglang_hcache.capture.staging import StagingRing
from sglang_hcache.core.config import WritePolicy
from sglang_hcache.core.keys import Namespace, chunk_keys
from sglang_hcache.core.layout import CHUNK_TOKENS, RUN_CHUNKS, Method
from sglang_hcache.core.observer import Counters
from sglang_hcache.device.kv_gather import load_gather
from sglang_hcache.device.memory import host_buffer
from sglang_hcache.store.io.engine import IOKind
from sglang_hcache.tier.host import HostTier
from sglang_hcache.tier.tiered import TieredStore

HOST_BYTES = 512 * 2**20
"""Of the host tier that saves in two stages."""


class Saver(Protocol):
    """One way to save the hidden states of all layers."""

    def begin(self, rids: Sequence[str], num_tokens: int) -> None:
        """Requests start, each with at most ``num_tokens`` tokens."""

    def begin_pass(self, rows: Sequence[RequestRows], tokens: array[int]) -> None:
        """A pass begins; ``tokens`` has one entry a row."""

    def layer(self, index: int, hidden: torch.Tensor) -> None:
        """One layer's rows, (rows of the pass, hidden size), in the middle of the pass."""

    def end_pass(self) -> None:
        """The pass is over."""

    def settle(self) -> None:
        """Returns when nothing is being saved."""

    def end(self) -> None:
        """The requests are over; returns when everything is saved."""

    @property
    def rows_dropped(self) -> int:
        """Not saved, because there was no room for them at the time."""

    def counts(self) -> tuple[int, int]:
        """Writes and bytes since the last call."""

    def digest(self, rid: str, tokens: array[int]) -> str:
        """Of what is saved of the whole chunks of a request of the latest :meth:`begin`."""

    def close(self) -> None: ...


class TwoStageSaver:
    """The project's own parts, put together as a server with ``write_through`` has them."""

    def __init__(self, rig: Rig, folder: Path, largest_pass: int) -> None:
        self._layout = rig.model.layout((Method.HIDDEN,) * rig.num_layers)
        self._observer = Counters()
        self._disk, self._writes = open_disk(folder, IOKind.WRITE)
        slots = max(64, HOST_BYTES // self._layout.chunk_bytes)
        arena = host_buffer(slots * self._layout.chunk_bytes)
        staging = host_buffer(2 * largest_pass * sum(self._layout.row_bytes))
        for memory in (arena, staging):
            memory[:] = 0  # a server that has run for a while has all its pages
        host = HostTier(arena, self._layout, self._observer, keep_dirty=True)
        self._tiers = TieredStore(
            host, self._disk, self._observer, write_policy=WritePolicy.WRITE_THROUGH, run_chunks=RUN_CHUNKS
        )
        ring = StagingRing(torch.from_numpy(staging), self._layout, rig.model.dtype)
        self._assembler = Assembler(ring, self._tiers, self._observer, Copiers(1))
        self._passes = PassCapture(
            *(ring, self._assembler.publish, self._observer, self._layout.methods),
            load_gather(rig.device.pool, rig.num_layers, is_cpu=True),
        )
        self._rows: Sequence[RequestRows] = ()
        self._rids: Sequence[str] = ()
        self._sessions = 0

    def _namespace(self, rid: str) -> Namespace:
        return Namespace(b"saving", "saving", tenant=f"{self._sessions} {rid}")

    def begin(self, rids: Sequence[str], num_tokens: int) -> None:
        self._sessions += 1  # a namespace of its own: what is stored already would not be saved
        self._rids = rids
        for rid in rids:
            self._assembler.publish(RequestBegins(rid, self._namespace(rid), array("q")))

    def begin_pass(self, rows: Sequence[RequestRows], tokens: array[int]) -> None:
        self._rows = rows
        of_rows = torch.frombuffer(tokens, dtype=torch.int64)
        self._passes.begin(of_rows, of_rows)  # no layer stores K and V: nobody looks at slots

    def layer(self, index: int, hidden: torch.Tensor) -> None:
        self._passes.on_layer(index, hidden)

    def end_pass(self) -> None:
        self._passes.end(self._rows, is_replayed=False)

    def settle(self) -> None:
        while self._assembler.is_busy or self._tiers.is_saving:
            time.sleep(0.001)

    def end(self) -> None:
        for rid in self._rids:
            self._assembler.publish(RequestEnds(rid))
        self.settle()

    @property
    def rows_dropped(self) -> int:
        return self._observer["capture.rows_dropped_staging_full"]

    def counts(self) -> tuple[int, int]:
        return self._writes.take()

    def digest(self, rid: str, tokens: array[int]) -> str:
        keys = chunk_keys(self._namespace(rid).root_key(), tokens)
        sizes = self._layout.chunk_layer_bytes
        state = np.empty((len(keys), self._layout.chunk_bytes), np.uint8)
        with self._disk.lease(tuple(keys)) as lease:
            for layer, size in enumerate(sizes):
                out = host_buffer(len(keys) * size)
                self._disk.read_layers(lease, {layer: out})
                first = self._layout.layer_offset(layer)
                state[:, first : first + size] = out.reshape(len(keys), size)
        return hashlib.blake2b(state).hexdigest()

    def close(self) -> None:
        self._assembler.close()
        self._tiers.close()


class DirectSaver:
    """Writes rows where they belong, in the middle of the pass: one file a request.

    Args:
        to_device: past the page cache, so that each write waits for the device.
    """

    rows_dropped = 0

    def __init__(self, rig: Rig, folder: Path, largest_pass: int, *, to_device: bool) -> None:
        folder.mkdir()
        self._folder = folder
        self._layout = rig.model.layout((Method.HIDDEN,) * rig.num_layers)
        self._flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        row_bytes = self._layout.row_bytes[0]
        self._memory = host_buffer(largest_pass * row_bytes).reshape(largest_pass, row_bytes)
        if to_device:
            self._flags |= os.O_DIRECT if takes_direct(folder, row_bytes) else os.O_DSYNC
        self._files: dict[str, int] = {}
        self._rows: Sequence[RequestRows] = ()
        self._writes = self._bytes = 0

    def begin(self, rids: Sequence[str], num_tokens: int) -> None:
        self._close_files()
        size = -(-num_tokens // CHUNK_TOKENS) * self._layout.chunk_bytes
        for rid in rids:
            self._files[rid] = os.open(self._folder / rid, self._flags, 0o600)
            os.posix_fallocate(self._files[rid], 0, size)

    def begin_pass(self, rows: Sequence[RequestRows], tokens: array[int]) -> None:
        self._rows = rows

    def layer(self, index: int, hidden: torch.Tensor) -> None:
        rows = self._memory[: len(hidden)]
        torch.from_numpy(rows).copy_(hidden.contiguous().view(torch.uint8))  # O_DIRECT wants aligned memory
        for each in self._rows:
            file = self._files[each.rid]
            for place in places(each, self._layout, index):
                data = rows[place.first : place.first + place.count]
                written = os.pwrite(file, data.data, place.offset)
                assert written == data.nbytes
                self._writes += 1
                self._bytes += written

    def end_pass(self) -> None: ...

    def settle(self) -> None: ...

    def end(self) -> None: ...

    def counts(self) -> tuple[int, int]:
        found = self._writes, self._bytes
        self._writes = self._bytes = 0
        return found

    def digest(self, rid: str, tokens: array[int]) -> str:
        size = len(tokens) // CHUNK_TOKENS * self._layout.chunk_bytes
        with (self._folder / rid).open("rb") as file:
            return hashlib.blake2b(file.read(size)).hexdigest()

    def close(self) -> None:
        self._close_files()

    def _close_files(self) -> None:
        while self._files:
            rid, file = self._files.popitem()  # first of all: a signal may come before the last is closed
            os.close(file)
            (self._folder / rid).unlink()


def takes_direct(folder: Path, row_bytes: int) -> bool:
    """Whether the file system in ``folder`` writes single rows with O_DIRECT."""
    path = folder / "try"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError:
        return False
    try:
        return os.pwrite(file, host_buffer(row_bytes).data, row_bytes) == row_bytes
    except OSError:
        return False
    finally:
        os.close(file)
        path.unlink()
