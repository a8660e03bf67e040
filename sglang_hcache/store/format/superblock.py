"""What every directory knows of its store (docs/store-format.md, "Directories")."""

from __future__ import annotations

import json
import reprlib
from dataclasses import asdict, dataclass, replace
from typing import Annotated, TypeGuard

from pydantic import Field, Strict, TypeAdapter, ValidationError

from sglang_hcache.store.format.geometry import MAX_SEGMENT, MAX_STRIPES
from sglang_hcache.store.format.record import FORMAT_VERSION

MAX_BYTES = 2**16
"""A longer file is no superblock."""

Count = Annotated[int, Strict(), Field(ge=0)]


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """What all directories of a store agree on. The copy with the highest epoch counts."""

    store_id: Annotated[str, Field(min_length=32, max_length=32)]
    """32 hexadecimal digits."""
    epoch: Count
    """Grows with every change."""
    first_segment: Annotated[Count, Field(le=MAX_SEGMENT)]
    """Segments with lower numbers were cleared, even where their files could not be deleted."""
    file_systems: Annotated[tuple[Count, ...], Field(max_length=MAX_STRIPES)]
    """``f_fsid`` of each directory's file system: an empty directory on another one is not mounted."""
    size_bytes: Count
    """The cap it was last opened with."""
    segment_bytes: Count
    free_floor_bytes: Count
    free_floor_percent: Annotated[float, Strict(), Field(ge=0, lt=100, allow_inf_nan=False)]

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
            return cls(StoreIdentity("", 0, 0, (), 0, 0, 0, 0.0), 0, fields["format_version"])
        try:
            identity = _LOADER.validate_python(fields)
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            raise ValueError(f"{name} is {reprlib.repr(fields.get(name))}") from None
        stripe = fields.get("stripe")
        if not _is_count(stripe) or stripe >= identity.num_stripes:
            raise ValueError(f"stripe {reprlib.repr(stripe)} of {identity.num_stripes}")
        return cls(identity, stripe)


_LOADER = TypeAdapter(StoreIdentity)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
