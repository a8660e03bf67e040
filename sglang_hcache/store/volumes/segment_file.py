"""What is known of a segment's file without opening it."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """What a listing says of a segment's file."""

    size: int
    taken_bytes: int
    """The larger of its length and its allocated blocks."""
    written_s: float
    """When it was last written to, seconds since 1970."""

    @classmethod
    def of(cls, found: os.stat_result) -> SegmentFile:
        return cls(found.st_size, max(found.st_size, found.st_blocks * 512), found.st_mtime)
