"""A copy of the installed SGLang with ``patches/`` applied: links, but for the files that are patched."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

PATCHES = Path(__file__).parents[1] / "patches" / "sglang-0.5.17"
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True)
class FilePatch:
    """What a unified diff does to one file."""

    target: PurePosixPath
    """Below the folder of the ``sglang`` package's parent: ``sglang/srt/...``."""
    body: tuple[str, ...]
    """The lines after the two of the header."""

    @classmethod
    def read(cls, path: Path) -> FilePatch:
        """Of a patch for SGLang's repository that changes one file."""
        old, new, *body = path.read_text().splitlines(keepends=True)
        target = new.removeprefix("+++ b/python/").rstrip("\n")
        assert old == f"--- a/python/{target}\n", f"{path.name}: {old!r}, {new!r}"
        return cls(PurePosixPath(target), tuple(body))

    def apply(self, text: str) -> str:
        """``text`` with every hunk at its line, character by character as the patch says: no fuzz, no offset."""
        lines, result, taken = text.splitlines(keepends=True), [], 0
        for start, old, new in self._hunks():
            assert lines[start : start + len(old)] == old, f"{self.target}: hunk at line {start + 1}"
            result += [*lines[taken:start], *new]
            taken = start + len(old)
        return "".join([*result, *lines[taken:]])

    def _hunks(self) -> Iterator[tuple[int, list[str], list[str]]]:
        """(first line counted from 0, old lines, new lines), checked against the counts in the hunk's header."""
        starts = [index for index, line in enumerate(self.body) if line.startswith("@@")]
        for begin, end in zip(starts, [*starts[1:], len(self.body)], strict=True):
            header = _HUNK.match(self.body[begin])
            assert header is not None, self.body[begin]
            content = self.body[begin + 1 : end]
            old = [line[1:] for line in content if line[0] in " -"]
            new = [line[1:] for line in content if line[0] in " +"]
            counts = (int(header[2] or 1), int(header[4] or 1))
            assert (len(old), len(new)) == counts, f"{self.target}: {self.body[begin]}"
            yield int(header[1]) - 1, old, new


def all_patches() -> list[Path]:
    return sorted(PATCHES.glob("*.patch"))


def installed_sglang() -> Path:
    """The folder of the installed package, found without importing it."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def write_patched_sglang(folder: Path) -> Path:
    """Make ``folder/sglang`` with all patches applied; ``folder`` then belongs first on ``PYTHONPATH``."""
    site = installed_sglang().parent
    patches = {patch.target: patch for patch in map(FilePatch.read, all_patches())}
    _link_around(PurePosixPath("sglang"), patches, site, folder)
    return folder


def _link_around(
    directory: PurePosixPath, patches: Mapping[PurePosixPath, FilePatch], site: Path, folder: Path
) -> None:
    """Make ``directory`` of ``site`` in ``folder``: folders on the way to a patched file, links beside it.

    Only ever creates, and in new folders only, so that nothing can be written through a link into ``site``.
    """
    (folder / directory).mkdir()
    for entry in (site / directory).iterdir():
        path = directory / entry.name
        if path in patches:
            (folder / path).write_text(patches[path].apply(entry.read_text()))
        elif any(target.is_relative_to(path) for target in patches):
            _link_around(path, patches, site, folder)
        elif entry.name != "__pycache__":  # the patched files' own must not be taken, nor replaced
            (folder / path).symlink_to(entry)
