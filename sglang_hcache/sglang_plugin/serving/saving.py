"""What requests compute, from forward passes to sealed chunks."""

from __future__ import annotations

import logging
import os
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import ParamSpec

import torch

from sglang_hcache.capture.assembler import Assembler
from sglang_hcache.capture.copiers import Copiers, copiers_for
from sglang_hcache.capture.events import RequestBegins, RequestEnds, RequestRows
from sglang_hcache.capture.passes import PassCapture
from sglang_hcache.capture.staging import StagingRing
from sglang_hcache.core.keys import ChunkKey, Namespace
from sglang_hcache.core.layout import CHUNK_TOKENS, Method
from sglang_hcache.core.observer import Observer
from sglang_hcache.core.throttle import Throttle
from sglang_hcache.device.kv_gather import load_gather
from sglang_hcache.device.streams import ClockStamp
from sglang_hcache.restore.gate import RestoreGate
from sglang_hcache.sglang_plugin.seam.budget import HostBudget
from sglang_hcache.sglang_plugin.seam.model import ServedModel
from sglang_hcache.sglang_plugin.seam.protocols import Device
from sglang_hcache.sglang_plugin.serving.prefill_times import PrefillTimes
from sglang_hcache.sglang_plugin.serving.request_ids import RequestIds
from sglang_hcache.tier.tiered import TieredStore

logger = logging.getLogger(__name__)

P = ParamSpec("P")


class Saving:
    """Everything runs on the scheduler's thread, in the middle of SGLang's forward passes: an error of ours ends the
    saving of the requests that it hits, and nothing else.

    Args:
        captures: whether the method stores anything.
        gate: is told how long prefills take; None: nobody predicts anything.
    """

    def __init__(
        self,
        model: ServedModel,
        tiers: TieredStore,
        budget: HostBudget,
        device: Device,
        observer: Observer,
        gate: RestoreGate | None,
        *,
        captures: bool,
    ) -> None:
        methods, gpu = tiers.layout.methods, device.gpu
        self._tiers = tiers
        self._observer = observer
        self._may_trace = Throttle()
        self.ids = RequestIds()
        self.captured = set[str]()
        """Requests of which what they compute is saved."""
        self.drops_thoughts = device.drops_thoughts
        memory = torch.from_numpy(device.host_memory(budget.ring_rows * sum(tiers.layout.row_bytes)))
        ring = StagingRing(memory, tiers.layout, model.row_dtype, device.pass_rows)
        # On a CPU the cores compute, and no pass is so fast that one thread does not keep up.
        copiers = Copiers(1) if device.is_cpu else copiers_for(len(os.sched_getaffinity(0)))
        self._assembler = Assembler(ring, tiers, observer, copiers)
        on_device = (None, None) if gpu is None else (gpu.ring, gpu.replayed)
        gather = load_gather(device.pool, tiers.layout.num_layers, is_cpu=device.is_cpu)
        self._passes = PassCapture(ring, self._assembler.publish, observer, methods, gather, *on_device)
        self._has_failed = False
        """Of the present pass nothing can be saved."""
        stamp = ClockStamp if gpu is None else gpu.stage.stamp
        self._prefill_times = None if gate is None else PrefillTimes(gate, stamp, device.largest_pass)
        if captures:
            # On a device, K and V of earlier layers are on their way beside later ones.
            watched = (Method.HIDDEN,) if device.is_cpu else (Method.HIDDEN, Method.KV)
            model.watch([layer for layer, method in enumerate(methods) if method in watched], self._on_layer)

    # -- requests --------------------------------------------------------------------------------

    def begin(self, rid: str, namespace: Namespace, prefix: array[int]) -> None:
        """A request is about to be computed from position ``len(prefix)`` on."""
        self.captured.add(rid)
        self._assembler.publish(RequestBegins(rid, namespace, prefix))

    def end(self, rid: str) -> None:
        """A request is over, retracted or aborted, or cannot be told from another one."""
        if rid in self.captured:
            self.captured.remove(rid)
            self._assembler.publish(RequestEnds(rid))

    def end_all(self) -> None:
        """Nothing more is saved of any request that runs."""
        self.captured.clear()
        self._assembler.publish(RequestEnds(None))

    def covers(self, parent: ChunkKey, tail: array[int]) -> bool:
        """Whether the rows of ``tail``, which begins the chunk behind ``parent``, are there from an earlier request."""
        return self._assembler.beginnings.covers(parent, tail)

    # -- forward passes --------------------------------------------------------------------------

    def begin_pass(self, rids: Sequence[str], tokens: torch.Tensor, slots: torch.Tensor) -> bool:
        """A forward pass starts; False if nothing of it is captured (then do not end it either).

        Args:
            tokens: (rows,) int64.
            slots: where it writes K and V, (rows,) int64.
        """
        if not any(rid in self.captured for rid in rids):
            return False
        self._try(self._begin, tokens, slots)
        if len(tokens) >= len(rids) + CHUNK_TOKENS:
            # Decoded rows that wait leave staging while this pass is computed: the next piece of a long prompt begins
            # when it has ended, and needs all that is left.
            self._try(self._assembler.wake)
        return True

    def _begin(self, tokens: torch.Tensor, slots: torch.Tensor) -> None:
        self._passes.begin(tokens, slots)
        if self._prefill_times is not None:
            self._prefill_times.begin(len(tokens))

    def end_pass(
        self,
        requests: Sequence[RequestRows],
        *,
        is_typical: bool,
        is_replayed: bool,
        is_prefill: bool = False,
    ) -> None:
        """The pass succeeded.

        Args:
            is_typical: it took as long as others of so many tokens.
            is_replayed: by a CUDA graph: no hook of Python's ran.
            is_prefill: that graph is one of those for prefill.
        """
        times = self._prefill_times
        if times is not None and is_typical:
            self._try(times.end, requests, is_replayed=is_replayed, is_prefill=is_prefill)
        self._try(self._passes.end, requests, is_replayed=is_replayed, is_prefill=is_prefill)
        if self._has_failed:
            self._has_failed = False
            for rows in requests:
                self.end(rows.rid)  # there is a gap in what is saved of it

    def abandon_pass(self) -> None:
        """The pass failed."""
        self._has_failed = False
        self._passes.abandon()

    def _on_layer(self, layer: int, hidden: torch.Tensor) -> None:
        self._try(self._passes.on_layer, layer, hidden)

    def _try(self, step: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        if self._has_failed:
            return
        try:
            step(*args, **kwargs)
        except Exception:
            self._has_failed = True
            self._passes.abandon()
            self._observer.count("capture.errors")
            if self._may_trace():
                logger.exception("hcache: a pass cannot be saved, nor what its requests compute later")

    # -- the whole -------------------------------------------------------------------------------

    def tick(self) -> None:
        """Once a scheduler round."""
        if self._assembler.has_lost_requests:
            self._assembler.has_lost_requests = False
            self.end_all()  # those whose prompts go on begin anew
        if self._prefill_times is not None:
            self._prefill_times.look()

    def then(self, work: Callable[[], None]) -> None:
        """Have another thread call ``work`` when the tiers have what was computed before."""
        self._assembler.publish(work)

    def clear(self) -> threading.Event:
        """Empty the tiers of what was computed before.

        Returns:
            Set when that is done; not if an error kept it from that.
        """
        is_done = threading.Event()

        def clear() -> None:
            self._assembler.beginnings.clear()
            self._tiers.clear()
            is_done.set()

        # In one call: of several, an error in one would not keep the next from being made.
        self.then(clear)
        return is_done

    @property
    def is_busy(self) -> bool:
        """Whether captured rows or demotions are being worked on."""
        return self._assembler.is_busy or self._tiers.is_saving

    @property
    def open_requests(self) -> int:
        """Requests of which more may be saved. From any thread."""
        return self._assembler.open_requests

    def close(self, timeout_s: float) -> None:
        """Seal what is whole, and stop. What takes longer goes on, and may be lost."""
        self._assembler.close(timeout_s)
