from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hcache.cli.plan.capacity import Sizing
from sglang_hcache.core.config import HCacheConfig
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.layout import Method, StateLayout
from sglang_hcache.restore.pipeline import NUM_BUFFERS, buffer_bytes
from sglang_hcache.sglang_plugin.seam import budget as budget_module
from sglang_hcache.sglang_plugin.seam.budget import (
    HostBudget,
    largest_pass_of,
    longest_run,
    pass_rows_of,
    pool_share,
    staged_passes_of,
    store_config,
)
from sglang_hcache.sglang_plugin.seam.ranks import Alone
from sglang_hcache.sglang_plugin.setup.assembly import budget_of
from sglang_hcache.store import StoreConfig

LAYOUT = StateLayout((Method.HIDDEN,) * 32, (4096 * 2,) * 32)


@pytest.mark.parametrize("has_disk", [False, True])
@pytest.mark.parametrize("host_size", ["1GB", "4GB", "10GB"])
@pytest.mark.parametrize("staging_size", [None, "200MB"])
@pytest.mark.parametrize("largest_pass", [512, 8192])
def test_the_parts_stay_within_the_whole(
    host_size: str, staging_size: str | None, largest_pass: int, has_disk: bool
) -> None:
    """Without a disk tier nothing is read."""
    disk = {"dirs": ["/d"]} if has_disk else {}
    config = HCacheConfig.from_settings({"host_size": host_size, "staging_size": staging_size, **disk})
    budget = HostBudget.of(config, LAYOUT, pass_rows=largest_pass, staged_passes=2)
    used = (
        budget.ring_rows * sum(LAYOUT.row_bytes)
        + budget.num_slots * LAYOUT.chunk_bytes
        + (NUM_BUFFERS * buffer_bytes(LAYOUT, budget.block_chunks) if has_disk else 0)
    )
    assert config.host_size - LAYOUT.chunk_bytes < used <= config.host_size
    assert 1 <= budget.block_chunks <= 64


def test_staging_holds_two_prefill_passes_where_there_is_room() -> None:
    config = HCacheConfig.from_settings({"host_size": "4GB"})
    assert HostBudget.of(config, LAYOUT, pass_rows=512, staged_passes=2).ring_rows == 1024
    assert HostBudget.of(config, LAYOUT, pass_rows=8192, staged_passes=2).ring_rows == 10**9 // sum(
        LAYOUT.row_bytes
    )


def test_the_planned_host_size_is_the_least_that_stages_all_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "available_host_bytes", lambda: 10**12)
    sizes = Sizing(8192, None, None, 0.0, None).data(sum(LAYOUT.row_bytes))
    assert sizes is not None
    least = sizes["host_size_at_least"]

    def ring_rows(host_size: int) -> int:
        config = HCacheConfig(host_size=host_size)
        return HostBudget.of(config, LAYOUT, pass_rows=8192, staged_passes=3).ring_rows

    assert ring_rows(least) == 3 * 8192
    assert ring_rows(least - 4) < 3 * 8192


@pytest.mark.parametrize(
    ("device", "has_no_overlap", "passes"), [("cuda", False, 3), ("cuda", True, 2), ("cpu", False, 2)]
)
def test_a_gpu_begins_a_pass_before_the_last_one_has_ended(
    device: str, has_no_overlap: bool, passes: int
) -> None:
    arguments = SimpleNamespace(device=device, disable_overlap_schedule=has_no_overlap)
    assert staged_passes_of(arguments) == passes
    config = HCacheConfig.from_settings({"host_size": "4GB"})
    assert HostBudget.of(config, LAYOUT, pass_rows=512, staged_passes=passes).ring_rows == passes * 512
    assert HostBudget.of(config, LAYOUT, pass_rows=8192, staged_passes=passes).ring_rows == 10**9 // sum(
        LAYOUT.row_bytes
    )


@pytest.mark.parametrize(("running", "rows"), [(None, 128), (16, 128), (200, 400)])
def test_staging_has_room_for_as_many_as_decode_at_once(running: int | None, rows: int) -> None:
    arguments = SimpleNamespace(chunked_prefill_size=64, max_running_requests=running)
    served = device(largest_pass_of(arguments), 2, pass_rows=pass_rows_of(arguments))
    assert served.largest_pass == 64
    assert budget_of(HCacheConfig.from_settings({"host_size": "4GB"}), LAYOUT, served, 8192).ring_rows == rows


@pytest.mark.parametrize(
    ("largest_pass", "passes", "warning"),
    [
        (1024, 3, None),
        (1500, 2, None),
        (
            1500,
            3,
            "staging holds 3814 tokens, not 3 prefill passes of up to 1500: of a long prompt not every",
        ),
        (
            3000,
            2,
            "staging holds 3814 tokens, not 2 prefill passes of up to 3000: of a long prompt not every",
        ),
        (
            4096,
            2,
            "staging holds 3814 tokens, a prefill pass may have 4096, and the rest is not saved; raise --",
        ),
    ],
)
def test_the_log_says_where_staging_is_too_small(
    largest_pass: int, passes: int, warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    budget_of(HCacheConfig.from_settings({"host_size": "4GB"}), LAYOUT, device(largest_pass, passes), 8192)
    assert [warning in message for message in caplog.messages if warning] == [True] * (warning is not None)
    assert bool(caplog.messages) is (warning is not None)


@pytest.mark.parametrize(
    ("context_length", "pool", "most"),
    [(3000, 10_000, 0), (8192, 3000, 0), (8192, 10_000, 8192), (8192, 5000, 5000)],
)
def test_a_pass_may_have_a_whole_prompt_where_none_is_cut(
    context_length: int, pool: int, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    """``--chunked-prefill-size -1``: SGLang takes the first prompt, whatever ``--max-prefill-tokens`` says."""
    whole = device(1500, 2, cuts_prompts=False, pool=pool)
    budget_of(HCacheConfig.from_settings({"host_size": "4GB"}), LAYOUT, whole, context_length)
    if not most:
        assert not caplog.messages
        return
    (message,) = caplog.messages
    assert f"staging holds 3000 tokens, a prefill pass may have {most}, and the rest is not saved" in message
    assert message.endswith("or cut long prompts with --chunked-prefill-size")


def device(
    largest_pass: int,
    passes: int,
    *,
    pass_rows: int | None = None,
    cuts_prompts: bool = True,
    pool: int = 10_000,
    ranks: Any = None,
) -> Any:
    return SimpleNamespace(
        largest_pass=largest_pass,
        pass_rows=pass_rows or largest_pass,
        staged_passes=passes,
        cuts_prompts=cuts_prompts,
        ranks=ranks or Alone(),
        tree=SimpleNamespace(capacity=lambda: pool),
    )


def test_several_ranks_take_no_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looks before any takes its part, and the error names what was asked for."""
    config = HCacheConfig.from_settings({"host_size": "16GB"}).of_rank(0, 2)
    looked = []

    def available(*values: float) -> tuple[float, ...]:
        looked.append(values)
        return (13 * 10**9,)

    ranks = SimpleNamespace(size=2, minimum=available)
    monkeypatch.setattr(budget_module, "available_host_bytes", lambda: 10**12)
    with pytest.raises(
        ConfigError, match=r"--hcache-host-size: 16\.0 GB is not allowed.* 13\.0 GB available"
    ):
        budget_of(config, LAYOUT, device(1024, 2, ranks=ranks), 8192)
    assert len(looked) == 1


def test_passes_may_be_shorter_than_a_chunk() -> None:
    config = HCacheConfig.from_settings({"host_size": "4GB"})
    assert HostBudget.of(config, LAYOUT, pass_rows=16, staged_passes=2).ring_rows == 128


@pytest.mark.parametrize(("disk_bytes", "chunks"), [(10**12, 16), (10 * 2**27, 10), (2**20, 1)])
def test_a_run_never_needs_all_of_a_small_disk(disk_bytes: int, chunks: int) -> None:
    assert LAYOUT.chunk_bytes == 2**24
    assert longest_run(LAYOUT, disk_bytes) == chunks


def test_a_model_with_more_layers_than_the_disk_tier_stores_is_refused() -> None:
    layout = StateLayout((Method.HIDDEN,) * 321, (8192,) * 321)
    with pytest.raises(ConfigError, match=r"--hcache-dirs: the model has 321 layers, .* at most 320"):
        longest_run(layout, 10**12)


def test_too_little_memory_says_how_much_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"--hcache-host-size: 100\.0 MB .* at least"):
        HostBudget.of(
            HCacheConfig.from_settings({"host_size": "100MB"}), LAYOUT, pass_rows=512, staged_passes=2
        )


def test_a_pool_and_the_host_tier_share_a_cpus_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_hcache.sglang_plugin.seam.budget.available_host_bytes", lambda: 20 * 10**9)
    assert pool_share(HCacheConfig.from_settings({"host_size": "4GB"}), 0.75) == 0.55
    with pytest.raises(
        ConfigError, match=r"--hcache-host-size: 15\.0 GB leaves no memory .*--max-total-tokens"
    ):
        pool_share(HCacheConfig.from_settings({"host_size": "15GB"}), 0.75)


def test_a_pool_leaves_room_for_a_host_tier_that_is_small_beside_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = 2 * 10**12
    monkeypatch.setattr("sglang_hcache.sglang_plugin.seam.budget.available_host_bytes", lambda: memory)
    config = HCacheConfig.from_settings({"host_size": "900MB"})
    assert pool_share(config, 0.9) * memory <= 0.9 * memory - config.host_size


def test_every_setting_of_the_disk_reaches_the_store(tmp_path: Path) -> None:
    """None of them is the default, which the store would have without it."""
    config = HCacheConfig(
        dirs=(tmp_path / "a", tmp_path / "b"), disk_size=2**30, disk_free_floor="12345B", segment_size=2**24,
        io_engine="posix", io_timeout_s=7.0, disk_write_budget=2**31, disk_max_age="12h",
    )  # fmt: skip
    expected = StoreConfig(
        dirs=config.dirs, size_bytes=2**30, free_floor_bytes=12_345, segment_bytes=2**24, io_engine="posix",
        io_timeout_s=7.0, write_budget_bytes=2**31, max_age_s=12 * 3600.0, cost_doubling_tokens=600,
    )  # fmt: skip
    assert store_config(config, hidden_size=100) == expected
    config = config.model_copy(update={"disk_free_floor": "2.5%"})
    assert store_config(config, 100) == replace(expected, free_floor_bytes=0, free_floor_percent=2.5)
