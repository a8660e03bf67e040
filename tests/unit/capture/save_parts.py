"""The save path without a server: from a forward pass to chunks in a host tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from sglang_hcache.capture.assembler import Assembler
from sglang_hcache.capture.copiers import Copiers
from sglang_hcache.capture.device_ring import DeviceRing
from sglang_hcache.capture.passes import PassCapture
from sglang_hcache.capture.replayed import ReplayedRows
from sglang_hcache.capture.staging import StagingRing
from sglang_hcache.core.config import WritePolicy
from sglang_hcache.core.keys import Namespace, chunk_keys
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, StateLayout
from sglang_hcache.core.observer import Counters
from sglang_hcache.device.kv_gather import KVGather
from sglang_hcache.tier.host import HostTier
from sglang_hcache.tier.tiered import TieredStore

TrueRows = Callable[[int, int, int], torch.Tensor]
"""What a layer has of the tokens at positions [first, end): (end - first, width)."""


def no_gather(into: torch.Tensor, first: int, slots: torch.Tensor) -> None:
    raise AssertionError("no layer stores K and V")


def join_late(patch: pytest.MonkeyPatch, num_layers: int) -> None:
    """A mutant: a recorded pass waits for each layer's copy with the next layer, as its input is there."""
    end_layer, on_layer = ReplayedRows.end_layer, ReplayedRows.on_layer

    def join_then_copy(rows: ReplayedRows, layer: int, hidden: torch.Tensor) -> None:
        end_layer(rows)
        on_layer(rows, layer, hidden)
        if layer == num_layers - 1:
            end_layer(rows)

    patch.setattr(ReplayedRows, "on_layer", join_then_copy)
    patch.setattr(ReplayedRows, "end_layer", lambda _rows: None)


class SaveParts:
    """Of float32 rows.

    Args:
        slots: of the host tier.
        rows: of the staging ring.
        pass_rows: of the largest pass.
    """

    copying_threads = 1

    def __init__(self, layout: StateLayout, slots: int, rows: int, pass_rows: int = 1) -> None:
        self._layout = layout
        self.counters = Counters()
        memory = np.zeros(slots * layout.chunk_bytes, np.uint8)
        host = HostTier(memory, layout, self.counters, keep_dirty=False)
        self.tiers = TieredStore(host, None, self.counters, write_policy=WritePolicy.WRITE_BACK, run_chunks=4)
        staging = torch.zeros(rows * sum(layout.row_bytes), dtype=torch.uint8)
        self.ring = StagingRing(staging, layout, torch.float32, pass_rows)
        self.assembler = Assembler(self.ring, self.tiers, self.counters, Copiers(self.copying_threads))

    def capture(
        self,
        methods: Sequence[Method] | None = None,
        gather: KVGather = no_gather,
        device: DeviceRing | None = None,
        replayed: ReplayedRows | None = None,
    ) -> PassCapture:
        """
        Args:
            methods: None: a hook shows all that each layer stores, whatever its layout.
        """
        methods = methods or (Method.HIDDEN,) * self._layout.num_layers
        return PassCapture(
            *(self.ring, self.assembler.publish, self.counters, methods, gather, device, replayed)
        )

    def chunks(
        self, namespace: Namespace, tokens: Sequence[int], true_rows: TrueRows
    ) -> Iterator[list[int] | None]:
        """Of each whole chunk of ``tokens``: the layers whose rows are wrong; None: it is not stored."""
        host = self.tiers.host
        for index, key in enumerate(chunk_keys(namespace.root_key(), tokens)):
            slot = host.pin(key)
            if slot is None:
                yield None
                continue
            first = index * CHUNK_TOKENS
            yield [
                layer
                for layer in range(self._layout.num_layers)
                if not torch.equal(
                    torch.from_numpy(host.layer_of(slot, layer)).view(torch.float32).view(CHUNK_TOKENS, -1),
                    true_rows(layer, first, first + CHUNK_TOKENS),
                )
            ]
            host.unpin(key, slot)
