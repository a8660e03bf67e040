"""What is stored of a chunk, layer by layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

CHUNK_TOKENS = 64
"""Tokens in a chunk. Part of every stored byte's meaning: never change it."""
RUN_CHUNKS = 16
"""Most chunks that are written to disk together as one run."""


class Method(StrEnum):
    """How one layer of a prefix comes back. Values are persisted: never rename one."""

    HIDDEN = "hidden"
    KV = "kv"
    RECOMPUTE = "recompute"


class PlanKind(StrEnum):
    """Which methods a plan may mix. Values are what ``--hcache-method`` takes."""

    AUTO = "auto"
    """All three: HCache."""
    HIDDEN = "hidden"
    """Hidden states for every layer: HCache-O."""
    KV = "kv"
    """K and V for every layer: KV offload."""
    HYBRID = "hybrid"
    """Recomputation and K and V, no hidden states."""
    RECOMPUTE = "recompute"
    """Every layer from tokens: what happens without a tier."""

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods that it may mix."""
        if self is PlanKind.AUTO:
            return tuple(Method)
        return (Method.KV, Method.RECOMPUTE) if self is PlanKind.HYBRID else (Method(self.value),)

    @property
    def stored(self) -> tuple[Method, ...]:
        """Those of them for which something is stored."""
        return tuple(method for method in self.methods if method is not Method.RECOMPUTE)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Neighbouring layers that store rows of one size."""

    first: int
    count: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The bytes of one token in every layer, and what they are.

    A chunk's state is layer-major: layer 0's 64 rows, layer 1's 64 rows, and so on.
    """

    methods: tuple[Method, ...]
    """What each layer stores: ``HIDDEN`` or ``KV``."""
    row_bytes: tuple[int, ...]
    """Bytes of one token's row in each layer."""
    chunk_layer_bytes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Bytes of one chunk in each layer."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunk_layer_bytes", tuple(CHUNK_TOKENS * size for size in self.row_bytes))
        if len(self.methods) != len(self.row_bytes) or not self.methods:
            raise ValueError("methods and row_bytes need one entry a layer")
        if any(size <= 0 for size in self.row_bytes):
            raise ValueError(f"row sizes must be positive, got {self.row_bytes}")

    @classmethod
    def of(cls, methods: Sequence[Method], hidden_row_bytes: int, kv_row_bytes: int) -> StateLayout:
        """A layout of ``HIDDEN`` and ``KV`` layers.

        Raises:
            ValueError: a layer stores nothing; a chunk has a row for every layer.
        """
        if not set(methods) <= {Method.HIDDEN, Method.KV}:
            raise ValueError("every layer of a chunk stores something")
        rows = {Method.HIDDEN: hidden_row_bytes, Method.KV: kv_row_bytes}
        return cls(tuple(methods), tuple(rows[method] for method in methods))

    @property
    def num_layers(self) -> int:
        return len(self.methods)

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers in order, neighbours with equal rows together: what can be copied at a time."""
        groups, first = [], 0
        for size, members in itertools.groupby(self.row_bytes):
            count = len(list(members))
            groups.append(LayerGroup(first, count, size))
            first += count
        return tuple(groups)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk in all layers."""
        return CHUNK_TOKENS * sum(self.row_bytes)

    def layer_offset(self, layer: int) -> int:
        """Byte at which ``layer`` begins inside a chunk's state."""
        return CHUNK_TOKENS * sum(self.row_bytes[:layer])
