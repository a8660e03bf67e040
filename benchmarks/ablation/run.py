"""One run of the ablations: a model, and the sections that were asked for, one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from ablation.partition import measure_partition
from ablation.report import flat
from ablation.saving import measure_saving
from ablation.schedules import measured_row, paper_rows
from ablation.settings import Section, Sizes
from common.gathered import Gathered
from common.terminal import new_progress, while_doing
from restoring.counted_disk import open_disk
from restoring.rig import Rig
from restoring.settings import PIECE
from sglang_hcache.cli.tiny_model.model import TinyModel
from sglang_hcache.cli.tiny_model.write import write_tiny_model
from sglang_hcache.store.io.engine import IOKind


@dataclass
class Run:
    """One run of the benchmark."""

    section: Section
    model: TinyModel
    sizes: Sizes
    folder: Path
    found: Gathered

    def measure(self) -> None:
        """The sections that were asked for."""
        measures = {
            Section.PARTITION: self._partition,
            Section.SAVING: self._saving,
            Section.SCHEDULES: self._schedules,
        }
        wanted = [section for section in measures if self._wants(section)]
        for section in wanted:
            self.found.expect(self._names(section), section.value)
        with new_progress() as progress:
            with while_doing(progress, "loading the model, computing a prompt"):
                rig = self._load()
            for section in wanted:
                measures[section](rig, progress)

    def _wants(self, section: Section) -> bool:
        return self.section in (section, Section.ALL)

    def _names(self, section: Section) -> list[str]:
        """What is measured, in words."""
        sizes = self.sizes
        if section is Section.PARTITION:
            return [_name(section, tier, length) for tier in sizes.tiers for length in sizes.lengths]
        if section is Section.SAVING:
            return [_name(section, load, size) for load, size in sizes.loads]
        return [section.value]

    def _add(self, name: str, section: Section, rows: Sequence[Any]) -> None:
        self.found.add(name, [flat(section, row) for row in rows])

    def _load(self) -> Rig:
        folder = self.folder / "model"
        write_tiny_model(folder, self.model)
        longest, room = [PIECE], 0
        if self._wants(Section.PARTITION):
            longest += self.sizes.lengths
        if self._wants(Section.SAVING):
            longest.append(self.sizes.prefill)
            room = self.sizes.room
        return Rig.load(folder, max(longest), PIECE, "--dtype", self.model.dtype, room=room)

    def _partition(self, rig: Rig, progress: Progress) -> None:
        sizes = self.sizes
        task = progress.add_task("partition", total=len(sizes.tiers) * len(sizes.lengths) * sizes.rounds)
        section = Section.PARTITION
        measure_partition(
            sizes, rig, self.folder, partial(progress.advance, task),
            lambda tier, length, rows: self._add(_name(section, tier, length), section, rows),
        )  # fmt: skip

    def _saving(self, rig: Rig, progress: Progress) -> None:
        sizes = self.sizes
        task = progress.add_task("saving", total=len(sizes.loads) * (1 + sizes.rounds))
        section = Section.SAVING
        measure_saving(
            sizes, rig, self.folder, partial(progress.advance, task),
            lambda load, size, rows: self._add(_name(section, load, size), section, rows),
        )  # fmt: skip

    def _schedules(self, rig: Rig, progress: Progress) -> None:
        with while_doing(progress, "schedules: measuring this machine"):
            disk, _ = open_disk(self.folder / "schedules", IOKind.READ)
            with contextlib.closing(disk):
                profile = rig.profile(disk, self.sizes.measure_s)
        rows = [*paper_rows(), *(measured_row(profile, tier) for tier in profile.tiers)]
        self._add(Section.SCHEDULES.value, Section.SCHEDULES, rows)


def _name(section: Section, load: str, size: int) -> str:
    unit = "requests" if load == "decode" else "tokens"
    return f"{section.value}: {load}, {size:,} {unit}"
