"""What the store is told and what it tells: configuration, runs, statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_hcache.core.config import IOEngineName
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.keys import KEY_BYTES, NAMESPACE_ID_BYTES
from sglang_hcache.core.units import format_bytes
from sglang_hcache.store.format.geometry import BLOCK, MAX_CHUNKS, MAX_LAYERS, MAX_STRIPES

FILE_SLACK_BYTES = 16 * 2**10
"""Allowance per segment file for what a file system adds (extent tree blocks), bytes."""

_RESERVE_MIN = 4 * 2**20
_RESERVE_SHARE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Settings of a :class:`DiskStore`; messages name the flags of ``core.config`` that set them.

    Raises:
        ConfigError: the values contradict each other.
    """

    dirs: tuple[Path, ...]
    """One directory per drive. Their order does not matter once the store exists."""
    size_bytes: int
    """Hard cap on physical bytes, all directories together."""
    free_floor_bytes: int
    """No new segment if a file system would be left with less than this free; where less is, segments go. See
    :meth:`floor_of`."""
    segment_bytes: int
    """Size of a segment, all directories together; the unit of eviction."""
    free_floor_percent: float = 0.0
    """Likewise, of the size of the file system."""
    io_engine: IOEngineName = IOEngineName.AUTO
    io_timeout_s: float = 5.0
    """An operation that takes longer is given up, and its directory taken out, seconds; writes have a second more for
    each 20 MB."""
    retry_s: float = 1.0
    """First attempt to take a directory in again, seconds; doubles up to a minute."""
    write_budget_bytes: int | None = None
    """Most bytes written in any 24 hours; None: as many as come."""
    max_age_s: float | None = None
    """Chunks are deleted so many seconds after they were written, or up to an eighth of that earlier; None: never."""
    cost_doubling_tokens: int = 24_576
    """Context length at which a token costs twice as much to recompute as at the start: 6 times the hidden size
    (linear layers 24 h^2, attention 4 h a token of context; [HCache §3.2])."""
    user_pid: int | None = None
    """The process that others are told to stop before they use these directories; None: this one."""
    makes_dirs: bool = True
    """Whether a directory that is missing is made, and an empty one taken in; else it is out."""

    def __post_init__(self) -> None:
        if not self.dirs:
            raise ConfigError("--hcache-dirs: the disk tier needs at least one directory")
        if len(self.dirs) > MAX_STRIPES:
            raise ConfigError(
                f"--hcache-dirs: {len(self.dirs)} directories, at most {MAX_STRIPES} are supported"
            )
        least = 2 * (self.file_bytes + FILE_SLACK_BYTES) * len(self.dirs) + self.reserve_bytes
        if self.size_bytes < least:
            raise ConfigError(
                f"--hcache-disk-size: {format_bytes(self.size_bytes)} is too small; segments of "
                f"{format_bytes(self.segment_bytes)} need at least {format_bytes(least)}"
            )

    def floor_of(self, total_bytes: int) -> int:
        """What stays free on a file system of this size, bytes."""
        return floor_of(total_bytes, self.free_floor_bytes, self.free_floor_percent)

    @property
    def floor_text(self) -> str:
        """The floor, for people."""
        return format_floor(self.free_floor_bytes, self.free_floor_percent)

    @property
    def file_bytes(self) -> int:
        """Bytes of one directory's file of a segment."""
        return max(self.segment_bytes // len(self.dirs) // BLOCK, 2) * BLOCK

    @property
    def reserve_bytes(self) -> int:
        """Part of the cap kept for the directories, the states and other small files."""
        return max(_RESERVE_MIN, self.size_bytes // _RESERVE_SHARE)

    @property
    def segments_budget_bytes(self) -> int:
        """Part of the cap that segment files may fill."""
        return self.size_bytes - self.reserve_bytes


def floor_of(total_bytes: int, num_bytes: int, percent: float) -> int:
    """What a floor of ``num_bytes``, or of a share of the file system, is on one of this size, bytes."""
    return max(num_bytes, math.ceil(percent / 100 * total_bytes))


def format_floor(num_bytes: int, percent: float) -> str:
    """A floor for people."""
    return f"{percent:g}%" if percent else format_bytes(num_bytes)


SCRATCH_NAMESPACE = b"hcache:measuring"
"""Of chunks that are written to see how fast it goes."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive chunks of one prefix to be written together.

    Raises:
        ValueError: an impossible size.
    """

    namespace_id: bytes
    """16 bytes."""
    keys: tuple[bytes, ...]
    """Chunk keys, 1 to 64 of them, 32 bytes each."""
    first_chunk: int
    """Position of the first chunk's first token, divided by 64."""
    chunk_layer_bytes: tuple[int, ...]
    """Bytes of one chunk in each layer."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.keys) <= MAX_CHUNKS:
            raise ValueError(f"a run has 1 to {MAX_CHUNKS} chunks, got {len(self.keys)}")
        if any(len(key) != KEY_BYTES for key in self.keys):
            raise ValueError(f"a chunk key has {KEY_BYTES} bytes")
        if len(self.namespace_id) != NAMESPACE_ID_BYTES:
            raise ValueError(f"a namespace id has {NAMESPACE_ID_BYTES} bytes")
        if not 0 <= self.first_chunk < 2**32:
            raise ValueError(f"first_chunk {self.first_chunk} is out of range")
        if len(self.chunk_layer_bytes) > MAX_LAYERS:
            raise ValueError(f"a run has at most {MAX_LAYERS} layers, got {len(self.chunk_layer_bytes)}")
        if not self.chunk_layer_bytes or not all(0 < size < 2**32 for size in self.chunk_layer_bytes):
            raise ValueError(f"layer sizes must be 1 to 2**32 - 1 bytes, got {self.chunk_layer_bytes}")


@dataclass(frozen=True, slots=True)
class DirectoryStats:
    path: Path
    condition: str
    """``healthy``, ``read-only`` or ``out``."""
    reason: str
    """Why it is not healthy; or why, although it is, it stores nothing new or no server would start with it."""
    corrupt_extents: int = 0
    """Reads from it that found other bytes than were written, since the store was created."""
    io_errors: int = 0
    """Operations on it that failed, likewise."""

    @property
    def takes_writes(self) -> bool:
        """Whether it is healthy and stores what is new."""
        return self.condition == "healthy" and not self.reason


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store as it is, or one that could not be opened."""

    chunks: int
    """Distinct chunk keys."""
    runs: int
    segments: int
    quarantined: int
    """Chunks that are damaged and not served."""
    layouts: tuple[tuple[int, ...], ...]
    """Bytes of each layer of a chunk: all that there were since the start, that of the newest run first."""
    used_bytes: int
    """What segments count against the cap, deleted ones whose files are not gone too; as of a moment ago."""
    cap_bytes: int
    written_today_bytes: int
    """Bytes written in the last 24 hours."""
    write_budget_bytes: int | None
    engine: str
    """What reads and writes: ``posix`` or ``nixl``; ``none`` if it was not opened."""
    totals: Mapping[str, int]
    """Counts since the store was created, by event."""
    directories: tuple[DirectoryStats, ...]

    @classmethod
    def not_opened(cls, config: StoreConfig, why: str) -> StoreStats:
        """Statistics of a store that a server does without for now: all of its directories are out."""
        return cls(
            chunks=0,
            runs=0,
            segments=0,
            quarantined=0,
            layouts=(),
            used_bytes=0,
            cap_bytes=config.size_bytes,
            written_today_bytes=0,
            write_budget_bytes=config.write_budget_bytes,
            engine="none",
            totals={},
            directories=tuple(DirectoryStats(path, "out", _not_open(why)) for path in config.dirs),
        )

    def still_not_opened(self, why: str) -> StoreStats:
        """As :meth:`not_opened` said, for this reason now."""
        return replace(
            self, directories=tuple(replace(item, reason=_not_open(why)) for item in self.directories)
        )


def _not_open(why: str) -> str:
    return f"cannot be opened, and is tried again: {why}"
