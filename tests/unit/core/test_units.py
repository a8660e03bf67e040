from __future__ import annotations

import pytest

from sglang_hcache.core.units import format_bytes, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512", 512),
        ("8GB", 8 * 10**9),
        ("8 gb", 8 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5TiB", 3 * 2**39),
        ("1.005KB", 1005),
        ("9007199254740993", 2**53 + 1),
        (str(2**63 - 1), 2**63 - 1),
        (7, 7),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "8 GBs", "8x", "1e9", -1, True, None, 1.5])
def test_what_is_not_a_size(text: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        parse_size(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [str(2**63), "9" * 400, "9" * 400 + "TB", 10**400])
def test_no_size_is_larger_than_files_can_be(text: str | int) -> None:
    with pytest.raises(ValueError, match="less than 8 EiB"):
        parse_size(text)


def test_sizes_for_people() -> None:
    assert [format_bytes(size) for size in (0, 999, 1500, 2.5e9, 3e15)] == [
        "0 B",
        "999 B",
        "1.5 KB",
        "2.5 GB",
        "3000.0 TB",
    ]
