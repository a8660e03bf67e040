"""One run of the ablations: a model, and the sections that were asked for, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from ablation.partition import PartitionRow, PartitionSettings, measure_partition
from ablation.report import flat
from ablation.saving import SavingRow, SavingSettings, measure_saving
from ablation.schedules import ScheduleRow, measured_row, paper_rows
from ablation.settings import Section, Sizes
from common.terminal import new_progress, while_doing
from restoring.counted_disk import open_disk
from restoring.rig import Rig
from restoring.settings import PIECE
from sglang_hcache.cli.tiny_model import TinyModel, write_tiny_model
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.store.io.engine import IOKind


@dataclass
class Run:
    """One run of the benchmark."""

    section: Section
    model: TinyModel
    sizes: Sizes
    kv_layers: int | None
    folder: Path

    def measure(self) -> dict[str, Any]:
        """Rows of each section that was asked for, as JSON has them."""
        with new_progress() as progress:
            return {
                section: [flat(section, row) for row in rows] for section, rows in self._sections(progress)
            }

    def _wants(self, section: Section) -> bool:
        return self.section in (section, Section.ALL)

    def _sections(self, progress: Progress) -> Iterator[tuple[str, Sequence[Any]]]:
        with while_doing(progress, "loading the model, computing a prompt"):
            rig = self._load()
        if self._wants(Section.PARTITION):
            yield "partition", self._partition(rig, progress)
        if self._wants(Section.SAVING):
            yield "saving", self._saving(rig, progress)
        if self._wants(Section.SCHEDULES):
            yield "schedules", self._schedules(rig, progress)

    def _load(self) -> Rig:
        folder = self.folder / "model"
        write_tiny_model(folder, self.model)
        longest = [PIECE]
        if self._wants(Section.PARTITION):
            longest += self.sizes.lengths
        if self._wants(Section.SAVING):
            per_request = self.sizes.prompt + self.sizes.steps + CHUNK_TOKENS
            longest += [self.sizes.prefill, max(self.sizes.batches) * per_request]
        return Rig.load(folder, max(longest), PIECE)

    def _partition(self, rig: Rig, progress: Progress) -> list[PartitionRow]:
        sizes = self.sizes
        settings = PartitionSettings(sizes.tiers, sizes.lengths, self.kv_layers, sizes.rounds, self.folder)
        task = progress.add_task("partition", total=len(sizes.tiers) * len(sizes.lengths) * sizes.rounds)
        profile = partial(rig.profile, measure_s=sizes.measure_s)
        return measure_partition(settings, rig, profile, partial(progress.advance, task))

    def _saving(self, rig: Rig, progress: Progress) -> list[SavingRow]:
        sizes = self.sizes
        settings = SavingSettings(
            sizes.batches, sizes.prompt, sizes.steps, sizes.prefill, sizes.rounds, self.folder
        )
        task = progress.add_task("saving", total=(1 + len(sizes.batches)) * (1 + sizes.rounds))
        return measure_saving(settings, rig, partial(progress.advance, task))

    def _schedules(self, rig: Rig, progress: Progress) -> list[ScheduleRow]:
        with while_doing(progress, "schedules: measuring this machine"):
            disk, _ = open_disk(self.folder / "schedules", IOKind.READ)
            profile = rig.profile(disk, self.sizes.measure_s)
            disk.close()
        return [*paper_rows(), *(measured_row(profile, tier) for tier in profile.tiers)]
