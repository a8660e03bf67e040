"""What a store knows beside its segments (docs/store-format.md, "State"). Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sglang_hcache.store.format.geometry import MAX_CHUNKS, MAX_SEGMENT
from sglang_hcache.store.format.record import digest

K = TypeVar("K")
V = TypeVar("V")

MAX_BYTES = 2**26
"""A longer file is no state."""
MAX_COUNT = 2**62
"""Serial numbers are smaller: there is room to count on from any of them."""


@dataclass(frozen=True, slots=True)
class SegmentState:
    """What is known of a segment (docs/store-format.md, "Eviction")."""

    score: float = 0.0
    runs: int = 0
    """How many of it are served, at least in part."""


@dataclass(frozen=True, slots=True)
class State:
    """Of several copies the one with the highest serial number counts."""

    store_id: str = ""
    """Of whom it is."""
    serial: int = 0
    """0: nothing is known."""
    segments: Mapping[int, SegmentState] = field(default_factory=dict)
    """Those that were used longest ago first."""
    going: frozenset[int] = frozenset()
    """Those of which files may have been deleted or erased on purpose since this was written."""
    quarantined: Mapping[bytes, dict[int, str]] = field(default_factory=dict)
    """Run id -> chunk of the run -> why it is not served."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Named values, as their owners write them in JSON."""

    def to_bytes(self) -> bytes:
        """A line of JSON, and a line with its digest."""
        fields = {
            "store_id": self.store_id,
            "serial": self.serial,
            "segments": {number: [item.score, item.runs] for number, item in self.segments.items()},
            "going": sorted(self.going),
            "quarantined": {run_id.hex(): dict(why) for run_id, why in self.quarantined.items()},
            "meta": dict(self.meta),
        }
        line = json.dumps(fields).encode()
        return line + b"\n" + _digest_line(line)

    @classmethod
    def from_bytes(cls, text: bytes) -> State:
        """
        Raises:
            ValueError: it is not what :meth:`to_bytes` wrote.
        """
        line, _, rest = text.partition(b"\n")
        if rest != _digest_line(line):
            raise ValueError("its digest does not match")
        found = built(lambda line: dict(json.loads(line)), line)
        serial = found.get("serial")
        if not isinstance(serial, int) or not 0 < serial < MAX_COUNT:
            raise ValueError("it has no serial number")
        return cls(
            str(found.get("store_id")),
            serial,
            built(_segments_of, found.get("segments")),
            frozenset(built(_numbers_of, found.get("going"))),
            built(_quarantined_of, found.get("quarantined")),
            built(dict, found.get("meta")),
        )


def _digest_line(line: bytes) -> bytes:
    return b'"%016x"\n' % digest(line)


def built(build: Callable[[Any], dict[K, V]], found: Any) -> dict[K, V]:
    """What ``build`` makes of a value that was read; empty if it makes no sense."""
    try:
        return build(found)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


def _segments_of(found: dict[str, Any]) -> dict[int, SegmentState]:
    segments = {int(number): SegmentState(float(score), int(runs)) for number, (score, runs) in found.items()}
    return {
        number: item
        for number, item in segments.items()
        if 0 <= number <= MAX_SEGMENT and 0 <= item.score < math.inf and item.runs >= 0
    }


def _numbers_of(found: list[Any]) -> dict[int, None]:
    return dict.fromkeys(map(int, found))


def _quarantined_of(found: dict[str, Any]) -> dict[bytes, dict[int, str]]:
    return {
        bytes.fromhex(run_id): {
            int(chunk): str(why) for chunk, why in marks.items() if 0 <= int(chunk) < MAX_CHUNKS
        }
        for run_id, marks in found.items()
    }
