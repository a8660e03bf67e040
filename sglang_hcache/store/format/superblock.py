"""What every directory knows of its store (docs/store-format.md, "Directories")."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from sglang_hcache.store.format.geometry import MAX_SEGMENT, MAX_STRIPES
from sglang_hcache.store.format.record import FORMAT_VERSION

MAX_BYTES = 2**16
"""A longer file is no superblock."""

_COUNTS = (
    *("stripe", "epoch", "index_stripe", "first_segment"),
    *("size_bytes", "segment_bytes", "free_floor_bytes"),
)


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """What all directories of a store agree on. The copy with the highest epoch counts."""

    store_id: str
    """32 hexadecimal digits."""
    epoch: int
    """Grows with every change."""
    index_stripe: int
    """The directory that holds the index."""
    first_segment: int
    """Segments with lower numbers were cleared, even where their files could not be deleted."""
    file_systems: tuple[int, ...]
    """``f_fsid`` of each directory's file system: an empty directory on another one is not mounted."""
    size_bytes: int
    """The cap it was last opened with."""
    segment_bytes: int
    free_floor_bytes: int
    free_floor_percent: float = 0.0

    @property
    def num_stripes(self) -> int:
        return len(self.file_systems)

    def next(self, **changes: object) -> StoreIdentity:
        """A changed copy, one epoch later."""
        return replace(self, epoch=self.epoch + 1, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Superblock:
    """A store's identity and the place of one directory in it."""

    identity: StoreIdentity
    stripe: int
    format_version: int = FORMAT_VERSION

    def to_json(self) -> bytes:
        """One line of JSON."""
        fields = {"format_version": self.format_version, "stripe": self.stripe, **asdict(self.identity)}
        return json.dumps(fields).encode() + b"\n"

    @classmethod
    def from_json(cls, text: bytes) -> Superblock:
        """
        Raises:
            ValueError: it makes no sense. Of another format only the version is read.
        """
        if len(text) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        try:
            fields = json.loads(text)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not isinstance(fields, dict) or not _is_count(fields.get("format_version")):
            raise ValueError("no format version")
        if fields["format_version"] != FORMAT_VERSION:
            return cls(StoreIdentity("", 0, 0, 0, (), 0, 0, 0), 0, fields["format_version"])
        for name in _COUNTS:
            if not _is_count(fields.get(name)):
                raise ValueError(f"{name} is {fields.get(name)!r}")
        store_id, file_systems = fields.get("store_id"), fields.get("file_systems")
        if not isinstance(store_id, str) or len(store_id) != 32:
            raise ValueError(f"store_id is {store_id!r}")
        if not isinstance(file_systems, list) or not all(_is_count(item) for item in file_systems):
            raise ValueError(f"file_systems is {file_systems!r}")
        percent = fields.get("free_floor_percent", 0.0)
        if not isinstance(percent, int | float) or not 0 <= percent < 100:
            raise ValueError(f"free_floor_percent is {percent!r}")
        if fields["first_segment"] > MAX_SEGMENT:
            raise ValueError(f"first_segment is {fields['first_segment']}")
        if not max(fields["stripe"], fields["index_stripe"]) < len(file_systems) <= MAX_STRIPES:
            raise ValueError(f"stripe {fields['stripe']} of {len(file_systems)}")
        identity = StoreIdentity(
            store_id=store_id,
            epoch=fields["epoch"],
            index_stripe=fields["index_stripe"],
            first_segment=fields["first_segment"],
            file_systems=tuple(file_systems),
            size_bytes=fields["size_bytes"],
            segment_bytes=fields["segment_bytes"],
            free_floor_bytes=fields["free_floor_bytes"],
            free_floor_percent=percent,
        )
        return cls(identity, fields["stripe"])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
