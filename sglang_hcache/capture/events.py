"""What the serving thread tells the assembler, in order."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from sglang_hcache.capture.staging import RowSpan
from sglang_hcache.core.keys import Namespace
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.device.streams import Mark


@dataclass(frozen=True, slots=True)
class RequestBegins:
    """A request's rows will follow, from position ``len(prefix)`` on; an earlier request of that id is over.

    ``prefix`` holds its tokens before that position (they are in the device cache already). Where it ends inside of a
    chunk, the first rows of that chunk are copied from an earlier request's (:class:`.Beginnings`).
    """

    rid: str
    namespace: Namespace
    prefix: array[int]


@dataclass(slots=True)
class RequestRows:
    """``count`` rows of one request: row ``row`` of the span and on, positions ``position`` and on.

    Made for each request of each pass, on the serving thread: a frozen one takes three times as long to make.
    """

    rid: str
    position: int
    row: int
    count: int


def complete_no_chunk(requests: Sequence[RequestRows]) -> bool:
    """Whether each brings a single row, and not the last one of its chunk."""
    return all(rows.count == 1 and (rows.position + 1) % CHUNK_TOKENS for rows in requests)


@dataclass(frozen=True, slots=True)
class RowsCaptured:
    """One forward pass: whose rows, their tokens, and where what is stored of them lies.

    ``tokens``, (rows,) int64, has one entry a row of the pass; rows at or past ``span.count`` (all, without a span)
    were dropped. Tokens and rows are there once ``ready`` is reached; None: now. ``can_wait``: they complete no chunk,
    and nobody begins behind them before another event comes. ``is_incomplete``: not all layers were seen, so no row is
    kept, though staging had room.
    """

    requests: tuple[RequestRows, ...]
    tokens: torch.Tensor
    span: RowSpan | None
    ready: Mark | None = None
    can_wait: bool = False
    is_incomplete: bool = False


@dataclass(frozen=True, slots=True)
class RequestEnds:
    """No more rows of this request; None: of any request."""

    rid: str | None


Event: TypeAlias = RequestBegins | RowsCaptured | RequestEnds | Callable[[], None]
"""A function is called on the assembler's thread, when the tiers have what earlier events bring."""
