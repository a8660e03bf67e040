"""Memory on a GPU, taken before SGLang gives what is left to its KV pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_hcache.capture.device_ring import DeviceRing
from sglang_hcache.capture.replayed import ReplayedRows
from sglang_hcache.core.layout import PlanKind
from sglang_hcache.device.memory import HostMemory, PinnedMemory
from sglang_hcache.device.streams import Streams
from sglang_hcache.plan.shapes import ModelShape
from sglang_hcache.restore.stage import DeviceStage, StageSizes
from sglang_hcache.sglang_plugin.seam.model import ServedModel


@dataclass(frozen=True, slots=True)
class DeviceBuffers:
    """What rows go through on their way to and from it."""

    stage: DeviceStage
    """What restores go through."""
    ring: DeviceRing
    """What saved rows go through."""
    replayed: ReplayedRows | None
    """Hidden states of passes that CUDA graphs replay; None: there are none, or no hidden states of them are stored."""
    host_memory: HostMemory
    """Makes the host buffers that the device copies from and to."""

    @classmethod
    def take(
        cls,
        streams: Callable[[], Streams],
        model: ServedModel,
        method: PlanKind,
        most_replayed: int,
        records_prefill: Callable[[], bool],
        records_one_graph: Callable[[], bool],
    ) -> DeviceBuffers:
        """Allocate all of it.

        Args:
            streams: makes queues of the device.
            most_replayed: rows of the largest pass that is replayed; 0: none are.
            records_prefill: whether the pass that is being recorded is of prefills.
            records_one_graph: whether it is of decoding, and becomes one graph, not several that end at attention.
        """
        shape = model.shape
        # Those of several ranks are much wider than a rank's K and V, and never stored.
        hidden_row_bytes = shape.hidden_row_bytes if model.why_not_hidden is None else shape.kv_row_bytes
        sizes = StageSizes.of(hidden_row_bytes, shape.kv_row_bytes)
        stage = DeviceStage(streams(), sizes, model.context_length)
        ring, replayed = DeviceRing(streams(), sizes.buffer_bytes), None
        if most_replayed and may_store_hidden(model, method):
            replayed = ReplayedRows(
                streams(),
                shape.num_layers,
                shape.hidden_size,
                most_replayed,
                model.dtype,
                records_prefill,
                records_one_graph,
            )
            model.watch(range(shape.num_layers), replayed.on_layer, replayed.end_layer)
        return cls(stage, ring, replayed, PinnedMemory())

    @property
    def num_bytes(self) -> int:
        """Device memory that they hold."""
        replayed = 0 if self.replayed is None else self.replayed.num_bytes
        return self.stage.num_bytes + self.ring.num_bytes + replayed


def may_store_hidden(model: ServedModel, method: PlanKind) -> bool:
    """Whether ``method`` stores hidden states of some layers."""
    return model.why_not_hidden is None and bool(model.attention) and chooses_hidden(method, model.shape)


def chooses_hidden(method: PlanKind, shape: ModelShape) -> bool:
    """Whether ``method`` stores hidden states where it may. ``auto`` does only where those are the smaller ones."""
    if method is PlanKind.AUTO:
        return shape.hidden_row_bytes < shape.kv_row_bytes
    return method is PlanKind.HIDDEN
