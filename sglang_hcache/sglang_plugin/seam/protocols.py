"""The seam between SGLang's classes (``compat/``) and our version-neutral logic."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NewType, Protocol

import torch

from sglang_hcache.device.memory import HostMemory, host_buffer
from sglang_hcache.device.projector import KVPool
from sglang_hcache.sglang_plugin.seam.gpu import DeviceBuffers
from sglang_hcache.sglang_plugin.seam.ranks import Alone, Ranks

Node = NewType("Node", object)
"""A node of the device's radix tree; opaque here."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a cache may serve of one request.

    Args:
        rid: SGLang's request id.
        tokens: the prompt without the tokens that must be computed in any case (the last one, and those whose
            logprobs are wanted).
        tenant: SGLang's ``extra_key``, which holds ``cache_salt`` and the id of an adapter too.
    """

    rid: str
    tokens: array[int]
    tenant: str | None


@dataclass(frozen=True, slots=True)
class DeviceMatch:
    """Longest prefix on the device, cut to whole chunks: its slots (tokens,) int64 and the node it ends at."""

    slots: torch.Tensor
    node: Node

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """What SGLang wants room for before it admits a request: all of its tokens, and some that it will generate."""

    rid: str
    num_tokens: int
    new_tokens: int
    is_passed_over: bool = False
    """Whether SGLang admits those behind it first: its adapter has no place beside those of the others."""


class DeviceTree(Protocol):
    """The device's radix tree and its slots. Only the scheduler's thread calls it."""

    evictions: int
    """Number of nodes evicted so far."""

    def match_tokens(self, tokens: array[int], tenant: str | None) -> DeviceMatch:
        """Longest cached prefix of ``tokens`` in whole chunks."""

    def match_length(self, tokens: array[int], tenant: str | None) -> int:
        """How many tokens that has."""

    def lock(self, node: Node) -> None:
        """Keep the path to ``node`` from eviction until :meth:`unlock`."""

    def unlock(self, node: Node) -> None: ...

    def allocate(self, count: int) -> torch.Tensor | None:
        """``count`` slots, evicting if needed; None if there is no room."""

    def free(self, slots: torch.Tensor) -> None: ...

    def insert_tokens(self, tokens: array[int], tenant: str | None, slots: torch.Tensor) -> tuple[int, Node]:
        """Put ``slots`` (one a token) into the tree.

        Returns how many leading tokens were there already (the tree keeps its own slots for those) and the
        node at which ``tokens`` ends.
        """

    def room(self) -> int:
        """Tokens that could be allocated now, eviction included."""

    def capacity(self) -> int:
        """Tokens of the whole KV pool."""


class SchedulerView(Protocol):
    """What we ask of the scheduler."""

    def is_running(self) -> bool:
        """Whether a forward pass will follow without our doing."""

    def waiting(self) -> Iterator[QueuedRequest]:
        """The requests in the waiting queue, in order."""

    def order_queue(self) -> None:
        """Put the waiting queue in order now: SGLang does so only when a request may be admitted, and looks at once."""

    def prefilling(self) -> tuple[int, int]:
        """Of a prompt that is computed in several passes: tokens left, and the position of the first of them.

        No other prefill begins before its last pass. (0, 0): there is none.
        """

    def looks_at_queue(self) -> bool:
        """Whether a waiting request may be admitted in this round: not while as many run as may."""

    def places(self) -> int:
        """How many waiting requests may be admitted beside those that run."""

    def doze(self, bell: int | None) -> None:
        """Wait a moment until ``bell``, a file descriptor, can be read, or requests come; None: a shorter one."""

    def reserved_tokens(self) -> int:
        """Tokens that running requests are expected to need still."""

    def look_again(self) -> None:
        """At the waiting queue: requests for which there was no room may find some now."""

    def metric_labels(self) -> dict[str, str] | None:
        """Labels of this process's metrics; None if there are none (no ``--enable-metrics``)."""


class ForwardModel(Protocol):
    """Forward passes of our own."""

    def extend(
        self,
        tokens: array[int],
        slots: torch.Tensor,
        start: int,
        num_layers: int,
        positions: torch.Tensor | None = None,
    ) -> float:
        """Run the tokens from position ``start`` on until the first ``num_layers`` layers have written K and V.

        Returns the seconds that took, without those for which it waited for passes that the device had begun.

        Args:
            tokens: the sequence from its beginning.
            slots: (len(tokens),) int64; K and V of the positions before ``start`` are in theirs already.
            positions: of the tokens that run, in place of those which they have.
        """


class Adapters(Protocol):
    """LoRA adapters that are loaded, or were."""

    def apart(self, tenant: str) -> tuple[str | None, bytes | None]:
        """A request's own part of ``tenant``, and the fingerprint of its adapter; each None for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What SGLang shows us of itself."""

    tree: DeviceTree
    pool: KVPool
    scheduler: SchedulerView
    forward: ForwardModel
    largest_pass: int
    """Most tokens of one prefill pass; where SGLang cuts no prompts, of one with several of them."""
    pass_rows: int
    """Most rows of one pass, also where each is of a request that decodes."""
    gpu: DeviceBuffers | None
    """Memory of a GPU; None on a CPU."""
    cuts_prompts: bool
    """Whether SGLang prefills a long prompt in several passes."""
    staged_passes: int
    """Passes that follow each other and have rows in staging at the same time."""
    drops_thoughts: bool = False
    """Whether SGLang keeps only the prompt of a request that thinks (``--strip-thinking-cache``)."""
    adapters: Adapters | None = None
    """None: the server has none."""
    ranks: Ranks = field(default_factory=Alone)

    @property
    def is_cpu(self) -> bool:
        """Whether the model computes on a CPU."""
        return self.gpu is None

    @property
    def host_memory(self) -> HostMemory:
        """Makes the host buffers that rows are copied from and to."""
        return host_buffer if self.gpu is None else self.gpu.host_memory
