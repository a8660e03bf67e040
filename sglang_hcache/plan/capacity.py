"""How much memory and disk a load takes, and how much is written to the drives."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hcache.core.config import STAGED_PASSES_AHEAD, STAGING_PARTS, host_size_for

DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Load:
    """What a server computes, and for how long that should be kept."""

    tokens_per_s: float
    """New tokens of prompts and answers, without what comes from a cache."""
    keep_s: float

    @property
    def kept_tokens(self) -> int:
        return round(self.tokens_per_s * self.keep_s)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes for a model and a load, in bytes."""

    bytes_per_token: int
    """Stored of one token, all layers together."""
    pass_tokens: int
    """Most tokens of one prefill pass."""

    @property
    def _staging(self) -> int:
        return STAGED_PASSES_AHEAD * self.pass_tokens * self.bytes_per_token

    @property
    def least_host(self) -> int:
        """The ``host_size`` on a GPU from which on no row of a prefill is lost for want of staging."""
        return STAGING_PARTS * self._staging

    def disk(self, load: Load) -> int:
        """The ``disk_size`` that keeps ``load``; index and half-full segments come on top."""
        return load.kept_tokens * self.bytes_per_token

    def host_alone(self, load: Load) -> int:
        """The ``host_size`` that keeps ``load`` without a disk tier."""
        return max(self.least_host, host_size_for(self._staging, self.disk(load)))

    def written_per_s(self, load: Load) -> float:
        """To disk, if everything that is computed is evicted in the end."""
        return load.tokens_per_s * self.bytes_per_token

    def written_a_day(self, load: Load) -> float:
        return self.written_per_s(load) * DAY_S
