"""A real model of SGLang in this process, a prompt that it computed, and tiers that hold the prompt's state."""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sglang.benchmark.one_batch import load_model
from sglang.srt.server_args import PortArgs, ServerArgs

from sglang_hcache.core.config import HCacheConfig, WritePolicy
from sglang_hcache.core.keys import ChunkKey, Namespace, chunk_keys
from sglang_hcache.core.layout import CHUNK_TOKENS, RUN_CHUNKS, Method, PlanKind, StateLayout
from sglang_hcache.core.observer import Counters
from sglang_hcache.device.attention import kv_weights
from sglang_hcache.device.memory import host_buffer
from sglang_hcache.plan.profile import Profile
from sglang_hcache.restore.decision import Decision
from sglang_hcache.restore.engine import RestoreEngine
from sglang_hcache.restore.gate import RestoreGate
from sglang_hcache.restore.job import RestoreState
from sglang_hcache.restore.methods import LayerRestorer
from sglang_hcache.restore.pipeline import (
    NUM_BUFFERS,
    NUM_READERS,
    LayerPipeline,
    buffer_bytes,
    layers_of_steps,
    parts_of,
)
from sglang_hcache.sglang_plugin.compat.v0_5_17.cache import DevicePool
from sglang_hcache.sglang_plugin.compat.v0_5_17.forward import ForwardOf
from sglang_hcache.sglang_plugin.compat.v0_5_17.runner import device_buffers, served_model
from sglang_hcache.sglang_plugin.hooks import install_cpu_fixes
from sglang_hcache.sglang_plugin.seam.budget import MOST_BLOCK_CHUNKS
from sglang_hcache.sglang_plugin.seam.model import ServedModel
from sglang_hcache.sglang_plugin.seam.protocols import Device, DeviceMatch, Prompt
from sglang_hcache.sglang_plugin.seam.ranks import Alone
from sglang_hcache.sglang_plugin.serving.restore_maker import RestoreMaker
from sglang_hcache.sglang_plugin.serving.tickets import Ticket
from sglang_hcache.sglang_plugin.setup.assembly import restorer_of
from sglang_hcache.sglang_plugin.setup.measuring import Bench
from sglang_hcache.store import DiskStore, Run
from sglang_hcache.tier.chunk import ChunkInfo
from sglang_hcache.tier.host import HostTier
from sglang_hcache.tier.tiered import TieredStore

MOST_ERROR = 0.05
"""Of a restored value, relative to the largest one: bf16, and passes of other sizes."""
NAMESPACE = Namespace(b"benchmark", "benchmark")


class PoolView:
    """What checks and measurements need of the device: slots. No tree."""

    def __init__(self, runner: Any) -> None:
        self._allocator = runner.token_to_kv_pool_allocator

    def allocate(self, count: int) -> torch.Tensor:
        slots = self._allocator.alloc(count)
        assert slots is not None, "the KV pool is too small"
        return slots

    def free(self, slots: torch.Tensor) -> None:
        self._allocator.free(slots)

    def capacity(self) -> int:
        return int(self._allocator.size)


class Idle:
    """A scheduler without requests."""

    def is_running(self) -> bool:
        return False


@dataclass
class Rig:
    """A loaded model and one prompt of ``length`` tokens in its KV pool."""

    model: ServedModel
    device: Device
    view: PoolView
    restorer: LayerRestorer
    tokens: array[int]
    slots: torch.Tensor
    hidden: list[torch.Tensor]
    """Of each layer, (length, hidden size)."""
    runner: Any
    """SGLang's ``ModelRunner``."""

    @classmethod
    def load(cls, folder: Path, length: int, piece: int, *more: str, room: int = 0) -> Rig:
        """Load the model in ``folder`` and compute a random prompt, ``piece`` tokens a pass.

        Args:
            more: arguments of the server.
            room: tokens that the KV pool has to hold beside the prompt, at least.
        """
        arguments = argparse.ArgumentParser()
        ServerArgs.add_cli_args(arguments)
        given = [
            *("--model-path", str(folder)),
            *("--max-total-tokens", str(length + max(room, 2 * length + 4 * piece))),
            *("--chunked-prefill-size", str(piece), "--skip-tokenizer-init", *more),
        ]
        if not torch.cuda.is_available():
            given += ["--device", "cpu", "--attention-backend", "torch_native"]
        server_args = ServerArgs.from_cli_args(arguments.parse_args(given))
        install_cpu_fixes(str(server_args.device))
        with redirect_stdout(sys.stderr):  # it prints
            loaded, _ = load_model(server_args, PortArgs.init_new(server_args), 0, 0)
        runner = loaded.torch_runner
        runner.hcache_ranks = Alone()  # as a hook of the server's does
        model = served_model(runner, runner.kv_cache_dtype)
        view, pool = PoolView(runner), DevicePool(runner.token_to_kv_pool)
        gpu = device_buffers(runner, PlanKind.AUTO)
        device = Device(
            tree=view,  # type: ignore[arg-type]
            pool=pool,
            scheduler=Idle(),  # type: ignore[arg-type]
            forward=ForwardOf(runner),
            largest_pass=piece,
            pass_rows=piece,
            cuts_prompts=True,
            staged_passes=2,
            gpu=gpu,
        )
        _, projector = next(model.projectors())
        restorer = replace(restorer_of(model, device), projector=projector)
        tokens = array("q", random.Random(0).choices(range(model.vocabulary), k=length))
        rig = cls(model, device, view, restorer, tokens, view.allocate(length), [], runner)
        rig._compute()
        return rig

    @property
    def num_layers(self) -> int:
        return self.model.shape.num_layers

    def recompute(self, length: int) -> float:
        """Seconds of computing the first ``length`` tokens, all layers."""
        slots = self.view.allocate(length)
        began = time.monotonic()
        self._run(slots, self.num_layers)
        seconds = time.monotonic() - began
        self.view.free(slots)
        return seconds

    def question(self, length: int) -> float:
        """Seconds of computing the last chunk of the first ``length`` tokens, with all others on the device."""
        new = self.view.allocate(CHUNK_TOKENS)
        start = length - CHUNK_TOKENS
        slots = torch.cat([self.slots[:start], new])
        began = time.monotonic()
        self.device.forward.extend(self.tokens[:length], slots, start, self.num_layers)
        seconds = time.monotonic() - began
        self.view.free(new)
        return seconds

    def kv_weight(self, layer: int) -> torch.Tensor:
        """The matrix that makes K and V of a layer: (2 * kv_heads * head_dim, hidden_size)."""
        attention = self.model.attention[layer]
        weight, _ = kv_weights(attention.module.get_submodule("qkv_proj"), attention.q_size)
        return weight

    def bare_products(self, layers: Iterable[int], lengths: Sequence[int]) -> float:
        """Seconds of the matrix products that make K and V, on contiguous inputs, and nothing else: what they make goes
        to the same memory each time, as in a restore.

        Args:
            lengths: rows of each layer's products.
        """
        seconds, columns = 0.0, len(self.kv_weight(0))
        with torch.inference_mode():
            out = torch.zeros(max(lengths), columns, dtype=self.model.dtype)  # touched
            for layer in layers:
                weight = self.kv_weight(layer).t()
                for length in lengths:
                    rows = self.hidden[layer][:length]
                    began = time.monotonic()
                    torch.mm(rows, weight, out=out[:length])
                    seconds += time.monotonic() - began
        return seconds

    def profile(self, disk: DiskStore | None, measure_s: float) -> Profile:
        """This machine and ``disk``, as a server measures them at start; ``measure_s`` seconds for each thing."""
        device = self.device
        return Bench(
            self.model,
            self.restorer,
            device,
            disk,
            device.largest_pass,
            measure_s,
            "benchmark",
            hidden=True,
            is_exact=False,
        ).measure()

    def stored_rows(self, layer: int, method: Method) -> torch.Tensor:
        """What capture would store of the prompt: (length, width)."""
        if method is Method.HIDDEN:
            return self.hidden[layer]
        return torch.cat([part.flatten(1) for part in self.device.pool.read(layer, self.slots)], dim=1)

    def error(self, slots: torch.Tensor) -> float:
        """Largest difference of K or V in ``slots`` from what the model computed, relative to the largest value."""
        worst = 0.0
        for layer in range(self.num_layers):
            mine = self.device.pool.read(layer, slots)
            for one, true in zip(mine, self.device.pool.read(layer, self.slots[: len(slots)]), strict=True):
                worst = max(worst, float((one - true).abs().max() / true.abs().max()))
        return worst

    def check(self, slots: torch.Tensor) -> float:
        """:meth:`error`, which must be small."""
        error = self.error(slots)
        assert error < MOST_ERROR, f"restored K or V differ by {error:.3g} of the largest value"
        return error

    def _run(self, slots: torch.Tensor, layers: int) -> None:
        piece = self.device.largest_pass
        for start in range(0, len(slots), piece):
            end = min(start + piece, len(slots))
            self.device.forward.extend(self.tokens[:end], slots[:end], start, layers)

    def _compute(self) -> None:
        rows: list[list[torch.Tensor]] = [[] for _ in range(self.num_layers)]
        handles = self.model.watch(
            range(self.num_layers), lambda layer, hidden: rows[layer].append(hidden.clone())
        )
        self._run(self.slots, self.num_layers)
        for handle in handles:
            handle.remove()
        self.hidden = [torch.cat(parts) for parts in rows]


class Variant:
    """One way to store and restore the rig's prompt.

    Args:
        disk: where the chunks are; None: host memory.
        gate: decides how many layers are recomputed.
        may_decline: whether it also decides that recomputing all is faster.
        longest: tokens of the prompt that are stored; None: all.
    """

    def __init__(
        self,
        rig: Rig,
        stored: Sequence[Method],
        disk: DiskStore | None,
        gate: RestoreGate,
        *,
        may_decline: bool,
        longest: int | None = None,
    ) -> None:
        self._may_decline = may_decline
        self.rig = rig
        self.stored = tuple(stored)
        self.layout = rig.model.layout(stored)
        self.keys = salted(chunk_keys(NAMESPACE.root_key(), rig.tokens[:longest]))
        self._over = threading.Event()
        self.error = 0.0
        """Of the last restore that was checked."""
        self.tiers = self._filled(disk)
        self._pipeline = LayerPipeline(self.tiers, rig.restorer, MOST_BLOCK_CHUNKS)
        self.engine = RestoreEngine(self._pipeline, Counters(), self._over.set)
        self._readers = ThreadPoolExecutor(NUM_READERS)
        self._buffers = [
            host_buffer(buffer_bytes(self.layout, MOST_BLOCK_CHUNKS)) for _ in range(NUM_BUFFERS)
        ]
        """For :meth:`read_alone`."""
        self.maker = RestoreMaker(rig.device, self.tiers, HCacheConfig(), Counters(), MOST_BLOCK_CHUNKS, gate)

    def restore(self, length: int, *, check: bool = False) -> tuple[float, Decision, bool]:
        """Seconds to bring back the first ``length`` tokens, what was predicted, and False if all were recomputed."""
        keys = self.keys[: length // CHUNK_TOKENS]
        began = time.monotonic()
        verdict = self.maker.decide(keys, 0, 0.0)
        decision = verdict.decision
        assert decision is not None
        if self._may_decline and not verdict.starts:
            return self.rig.recompute(length), decision, False
        slots = self.rig.view.allocate(length)
        nothing = DeviceMatch(slots[:0], object())  # type: ignore[arg-type]
        prompt = Prompt("benchmark", self.rig.tokens[:length], None)
        ticket = Ticket(prompt, keys, time.monotonic, Counters())
        restore = self.maker.prepare(ticket, nothing, keys, slots, decision, 60.0)
        self._over.clear()
        self.engine.submit(restore.job)
        while restore.is_recomputing:
            self.maker.advance([restore])
        self._over.wait()
        seconds = time.monotonic() - began
        assert restore.job.state is RestoreState.DONE, restore.job.error
        if check:
            self.error = self.rig.check(slots)
        self.rig.view.free(slots)
        return seconds, decision, True

    def read_alone(self, length: int) -> float:
        """Seconds to read the same extents into buffers like the server's, which were used before, and nothing else."""
        keys = self.keys[: length // CHUNK_TOKENS]
        blocks = [
            self.tiers.lease(keys[first : first + MOST_BLOCK_CHUNKS])
            for first in range(0, len(keys), MOST_BLOCK_CHUNKS)
        ]
        pipeline = self._pipeline
        buffers = self._buffers
        began = time.monotonic()
        pending: list[Any] = []
        layers = range(self.layout.num_layers)
        steps = [
            (block, step)
            for block in blocks
            for step in layers_of_steps(
                pipeline.layer_bytes(block, layers), pipeline.most_read, begins=block is blocks[0]
            )
        ]
        for number, (block, step) in enumerate(steps):
            if len(pending) == len(buffers):
                pending.pop(0).result()
            into = parts_of(buffers[number % len(buffers)], pipeline.layer_bytes(block, step))
            pending.append(self._readers.submit(self.tiers.read_layers, block, into))
        for read in pending:
            read.result()
        seconds = time.monotonic() - began
        for block in blocks:
            block.close()
        return seconds

    def close(self) -> None:
        self.engine.close()
        self._readers.shutdown()

    def _filled(self, disk: DiskStore | None) -> TieredStore:
        rows = [self.rig.stored_rows(layer, method) for layer, method in enumerate(self.stored)]
        return filled_tiers(self.layout, self.keys, rows, disk)


def salted(keys: Sequence[ChunkKey]) -> list[ChunkKey]:
    """Other keys in place of ``keys``: two variants must not share chunks on disk."""
    salt = os.urandom(16)
    return [ChunkKey(bytes(a ^ b for a, b in zip(key, salt * 2, strict=True))) for key in keys]


def filled_tiers(
    layout: StateLayout, keys: Sequence[ChunkKey], rows: Sequence[torch.Tensor], disk: DiskStore | None
) -> TieredStore:
    """Tiers that hold the chunks ``keys``, one prefix, on ``disk`` or, without one, in host memory.

    Args:
        rows: of each layer, (tokens, width), at least 64 for each key.
    """
    count = len(keys)
    chunks = [
        layer[: count * CHUNK_TOKENS].contiguous().cpu().view(torch.uint8).reshape(count, -1).numpy()
        for layer in rows
    ]
    slots = 0 if disk is not None else count  # without slots nothing is promoted
    host = HostTier(host_buffer(slots * layout.chunk_bytes), layout, Counters(), keep_dirty=False)
    tiers = TieredStore(host, disk, Counters(), write_policy=WritePolicy.WRITE_BACK, run_chunks=RUN_CHUNKS)
    for first in range(0, count, RUN_CHUNKS):
        part = slice(first, min(first + RUN_CHUNKS, count))
        if disk is not None:
            run = Run(bytes(16), tuple(keys[part]), first, layout.chunk_layer_bytes)
            disk.write_run(run, lambda layer, part=part: list(chunks[layer][part]))
            continue
        for index in range(part.start, part.stop):
            slot = tiers.reserve()
            assert slot is not None
            for layer, rows_of_layer in enumerate(chunks):
                host.layer_of(slot, layer)[:] = rows_of_layer[index]
            tiers.seal(slot, ChunkInfo(keys[index], bytes(32), index, bytes(16)))
    return tiers


def gate_of(profile: Profile, stored: Sequence[Method], kind: PlanKind, pass_tokens: int) -> RestoreGate:
    """The gate that a server with ``--hcache-method kind`` has."""
    mixes = kind in (PlanKind.AUTO, PlanKind.HYBRID)
    return RestoreGate(
        profile, stored, MOST_BLOCK_CHUNKS * CHUNK_TOKENS, may_recompute=mixes, pass_tokens=pass_tokens
    )
