"""What ``hcache plan`` says of sizes and wear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_hcache.core.config import KV_POOLS, STAGED_PASSES_AHEAD, STAGING_PARTS, host_size_for
from sglang_hcache.core.units import format_bytes, format_duration

_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Sizing:
    """What is asked for."""

    pass_tokens: int
    """Most tokens of one prefill pass."""
    pool_tokens: int | None
    """Of SGLang's KV pool; None: it is not known, and nothing is said of it."""
    tokens_per_s: float | None
    """New tokens of prompts and answers, without what comes from a cache; None: it is not known, and nothing is said
    of the disk."""
    keep_s: float
    """How long they should be kept."""
    drive_bytes: int | None
    """Size of all drives of the disk tier together; None: it is not known."""

    def data(self, bytes_per_token: int) -> dict[str, Any] | None:
        """For programs. Sizes in bytes; None if nothing is stored."""
        if not bytes_per_token:
            return None
        staging = STAGED_PASSES_AHEAD * self.pass_tokens * bytes_per_token
        # On a GPU no row of a prefill is lost for want of staging from there on.
        least_host = STAGING_PARTS * staging
        sizes = {
            "bytes_per_token": bytes_per_token,
            "pass_tokens": self.pass_tokens,
            "host_size_at_least": least_host,
        }
        if self.pool_tokens is not None:
            for_pool = host_size_for(staging, KV_POOLS * self.pool_tokens * bytes_per_token)
            sizes |= {
                "pool_tokens": self.pool_tokens,
                "host_size_for_pool": max(least_host, for_pool),
            }
        if self.tokens_per_s is None:
            return sizes
        kept = round(self.tokens_per_s * self.keep_s)
        disk = kept * bytes_per_token  # half-full segments come on top
        written_per_s = self.tokens_per_s * bytes_per_token  # if everything is evicted in the end
        written_a_day = written_per_s * _DAY_S
        return sizes | {
            "tokens_per_s": self.tokens_per_s,
            "keep_s": self.keep_s,
            "kept_tokens": kept,
            "disk_size": disk,
            "host_size_without_disk": max(least_host, staging + disk),  # nothing is read into buffers
            "written_per_s": written_per_s,
            "written_a_day": written_a_day,
            "drive_size": self.drive_bytes,
            "drive_writes_a_day": None if self.drive_bytes is None else written_a_day / self.drive_bytes,
        }

    def lines(self, bytes_per_token: int) -> list[str]:
        """For people."""
        data = self.data(bytes_per_token)
        if data is None:
            return []
        least = format_bytes(data["host_size_at_least"])
        lines = [f"Memory    {least} at least on a GPU, for prefill passes of {self.pass_tokens:,} tokens"]
        if self.pool_tokens is not None:
            size = format_bytes(data["host_size_for_pool"])
            lines.append(f"          {size} for {KV_POOLS} times the KV pool's {self.pool_tokens:,} tokens")
        if self.tokens_per_s is None:
            return lines
        kept = f"{self.tokens_per_s:,g} tokens/s for {format_duration(self.keep_s)}"
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
