"""What ``hcache plan`` says of sizes and wear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_hcache.core.units import format_bytes, format_duration
from sglang_hcache.plan.capacity import Capacity, Load


@dataclass(frozen=True, slots=True)
class Sizing:
    """What is asked for."""

    pass_tokens: int
    load: Load | None
    """None: it is not known, and nothing is said of the disk."""
    drive_bytes: int | None
    """Size of all drives of the disk tier together; None: it is not known."""

    def data(self, bytes_per_token: int) -> dict[str, Any] | None:
        """For programs. Sizes in bytes; None if nothing is stored."""
        if not bytes_per_token:
            return None
        capacity, load = Capacity(bytes_per_token, self.pass_tokens), self.load
        sizes = {
            "bytes_per_token": bytes_per_token,
            "pass_tokens": self.pass_tokens,
            "host_size_at_least": capacity.least_host,
        }
        if load is None:
            return sizes
        a_day, drives = capacity.written_a_day(load), self.drive_bytes
        return sizes | {
            "tokens_per_s": load.tokens_per_s,
            "keep_s": load.keep_s,
            "kept_tokens": load.kept_tokens,
            "disk_size": capacity.disk(load),
            "host_size_without_disk": capacity.host_alone(load),
            "written_per_s": capacity.written_per_s(load),
            "written_a_day": a_day,
            "drive_size": drives,
            "drive_writes_a_day": None if drives is None else a_day / drives,
        }

    def lines(self, bytes_per_token: int) -> list[str]:
        """For people."""
        data = self.data(bytes_per_token)
        if data is None:
            return []
        least = format_bytes(data["host_size_at_least"])
        lines = [f"Memory    {least} at least on a GPU, for prefill passes of {self.pass_tokens:,} tokens"]
        if self.load is None:
            return lines
        kept = f"{self.load.tokens_per_s:,g} tokens/s for {format_duration(self.load.keep_s)}"
        drives = data["drive_size"]
        of_drives = (
            ""
            if drives is None
            else f"{data['drive_writes_a_day']:,.1f} drive writes a day on {format_bytes(drives)}; "
        )
        return [
            *lines,
            f"          {format_bytes(data['host_size_without_disk'])} to keep {kept} without a disk tier",
            f"Disk      {format_bytes(data['disk_size'])} to keep {kept}: {data['kept_tokens']:,} tokens",
            f"Wear      {format_bytes(data['written_per_s'])}/s, {format_bytes(data['written_a_day'])} a day if all of "
            "it is evicted to disk",
            f"          {of_drives}--hcache-disk-write-budget bounds it",
        ]
