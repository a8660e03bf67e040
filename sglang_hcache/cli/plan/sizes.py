"""What ``hcache plan`` says of a model on a machine that nobody has described: bytes and sizes, and no times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from sglang_hcache.cli.plan.capacity import Sizing
from sglang_hcache.cli.plan.report import shape_text
from sglang_hcache.cli.report import METHOD_NAMES
from sglang_hcache.core.layout import Method
from sglang_hcache.plan.planner import stored_bytes
from sglang_hcache.plan.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class SizesReport:
    """For each of ``methods`` what a server needs that stores all layers by it."""

    model: ModelShape
    methods: tuple[Method, ...]
    why_not_hidden: str | None
    """As in :class:`PlanReport`."""
    sizing: Sizing

    def _bytes(self, method: Method) -> int:
        return stored_bytes(self.model, (method,) * self.model.num_layers)

    def data(self) -> dict[str, Any]:
        """For programs. Sizes in bytes."""
        return {
            "model": self.model.name,
            "why_not_hidden": self.why_not_hidden,
            "sizes": {str(method): self.sizing.data(self._bytes(method)) for method in self.methods},
        }

    def parts(self) -> list[RenderableType]:
        """For people."""
        lines = [] if self.why_not_hidden is None else [f"No hidden states: {self.why_not_hidden}."]
        for method in self.methods:
            size = self._bytes(method)
            lines += [
                "",
                f"Stored    {METHOD_NAMES[method]}: {size:,} bytes a token",
                *self.sizing.lines(size),
            ]
        lines += ["", "How fast that is restored: give --io-gbps and --tflops, or --profile FILE."]
        return [Text(shape_text(self.model), "bold"), *map(Text, lines)]
