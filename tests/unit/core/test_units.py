from __future__ import annotations

import pytest

from sglang_hcache.core.units import (
    exact_size,
    format_bytes,
    format_duration,
    parse_duration,
    parse_size,
    parse_size_or_percent,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512B", 512),
        ("8GB", 8 * 10**9),
        ("8 gb", 8 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5TiB", 3 * 2**39),
        ("1.005KB", 1005),
        ("9007199254740993", 2**53 + 1),
        (str(2**63 - 1), 2**63 - 1),
        (0, 0),
        ("1000000", 10**6),
        (10**6, 10**6),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "meant"),
    [("10%", "10%"), (" 2.5 % ", "2.5%"), ("0%", "0%"), ("8GB", 8 * 10**9), ("0", 0), ("100B", 100)],
)
def test_sizes_and_shares(text: str | int, meant: str | int) -> None:
    assert parse_size_or_percent(text) == meant
    assert parse_size_or_percent(meant if isinstance(meant, str) else exact_size(meant)) == meant


@pytest.mark.parametrize(
    "text", ["10", 10, "999999", "%", "-1%", "100%", "1e-3%", "10 percent", True, None, 0.1]
)
def test_what_is_neither_a_size_nor_a_share(text: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        parse_size_or_percent(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "8 GBs", "8x", "1e9", -1, True, None, 1.5])
def test_what_is_not_a_size(text: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        parse_size(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [str(2**63), "9" * 400, "9" * 400 + "TB", 10**400])
def test_no_size_is_larger_than_files_can_be(text: str | int) -> None:
    with pytest.raises(ValueError, match="less than 8 EiB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["4", 4, "1.5", "0.5", " 20 ", "999999"])
def test_a_small_number_lacks_its_unit(text: str | int) -> None:
    with pytest.raises(ValueError, match=rf"^{text!r} is \d+ bytes; write its unit, such as [\d.]+GB$"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0B"),
        (7, "7B"),
        (1500, "1500B"),
        (64 * 10**9, "64GB"),
        (2**32, "4GiB"),
        (10**12, "1TB"),
        (10**6, "1MB"),
    ],
)
def test_sizes_that_are_read_back(size: int, text: str) -> None:
    assert exact_size(size) == text
    assert parse_size(text) == size


def test_sizes_for_people() -> None:
    assert [format_bytes(size) for size in (0, 999, 1500, 999_960, 2.5e9, 3e15)] == [
        "0 B",
        "999 B",
        "1.5 KB",
        "1.0 MB",
        "2.5 GB",
        "3000.0 TB",
    ]


@pytest.mark.parametrize(
    ("text", "seconds", "again"),
    [
        ("1s", 1, "1s"),
        ("90s", 90, "90s"),
        ("120s", 120, "2m"),
        ("1.5h", 5400, "90m"),
        (" 12 h ", 43_200, "12h"),
        ("30d", 2_592_000, "30d"),
        ("2w", 1_209_600, "2w"),
        ("1.25s", 1.25, "1.25s"),
    ],
)
def test_times(text: str, seconds: float, again: str) -> None:
    assert parse_duration(text) == seconds
    assert format_duration(seconds) == again
    assert parse_duration(again) == seconds


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "0d", "0.5s", "1y", "1D", "36501d", 30, True, None])
def test_what_is_not_a_time(text: object) -> None:
    """A number alone might be seconds or days."""
    with pytest.raises(ValueError, match="time"):
        parse_duration(text)
