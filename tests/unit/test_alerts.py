"""The alerts of ``configs/prometheus``: they name metrics that there are, and fire when they should."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_hcache.core.metrics import describe

RULES = Path(__file__).parents[2] / "configs" / "prometheus" / "hcache-alerts.yml"


def rules() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]}


def test_they_name_metrics_that_there_are() -> None:
    known = {metric.name for metric in describe()}
    for alert, rule in rules().items():
        names = re.findall(r"sglang:\w+", rule["expr"])
        assert names, alert
        assert {re.sub("_(sum|count|bucket)$", "", name) for name in names} <= known, alert


def test_the_docs_list_them() -> None:
    text = (RULES.parents[2] / "docs" / "dashboard.md").read_text()
    assert set(re.findall(r"^\| `(HCache\w+)`", text, re.MULTILINE)) == set(rules())


SWITCHED_OFF = {'nothing_saved{instance="a", reason="switched_off"}': "1x120"}
PENDING = {'clearing_pending{instance="a"}': "1x120"}
STAYS = {'disk_events_total{instance="a", event="unlink_failed"}': "0+1x120"}
FULL = {'directory_takes_writes{instance="a", directory="x"}': "0x120"}
REFUSED = {'disk_events_total{instance="a", event="write_refused"}': "0+1x120"}
HEALTHY = {'directory_healthy{instance="a", directory="x"}': "1x120"}
SICK = {'directory_healthy{instance="a", directory="x"}': "0x120"}
OTHER_TAKES = {'directory_takes_writes{instance="a", directory="y"}': "1x120"}
HITS = {'lookups_total{instance="a", tp_rank="0", result="hit"}': "0+1x120"}
UP = {'up{instance="a", job="sglang"}': "1x120"}
POD = {'up{instance="a", job="kubernetes-pods"}': "1x120"}
WRONG_NAME = {'sglang_hcache_info{instance="a", version="0"}': "1x120"}
INFO = {'info{instance="a", version="0", method="kv"}': "1x120"}
SLOWER = {'restores_total{instance="a", tp_rank="0", result="predicted_slower"}': "0+1x120"}


def seconds(what: str, values: str) -> dict[str, str]:
    return {f'{what}_seconds_total{{instance="a", tp_rank="0"}}': values}


def ended(result: str, values: str) -> dict[str, str]:
    return {f'restores_total{{instance="a", tp_rank="0", result="{result}"}}': values}


@pytest.mark.parametrize(
    ("alert", "series", "minutes", "fires"),
    [
        ("HCacheSwitchedOff", SWITCHED_OFF, 59, False),
        ("HCacheSwitchedOff", SWITCHED_OFF, 61, True),
        ("HCacheClearingPending", PENDING, 14, False),
        ("HCacheClearingPending", PENDING, 16, True),
        ("HCacheFilesStay", STAYS, 30, True),
        ("HCacheNothingWritten", FULL, 14, False),
        ("HCacheNothingWritten", FULL, 30, True),
        ("HCacheNothingWritten", FULL | OTHER_TAKES, 30, False),
        ("HCacheNothingWritten", REFUSED | OTHER_TAKES, 30, True),
        ("HCacheDirectoryIdle", FULL | HEALTHY | OTHER_TAKES, 59, False),
        ("HCacheDirectoryIdle", FULL | HEALTHY | OTHER_TAKES, 61, True),
        ("HCacheDirectoryIdle", FULL | SICK | OTHER_TAKES, 90, False),
        ("HCacheDirectoryIdle", FULL | HEALTHY, 90, False),
        ("HCacheNothingRestored", HITS | SLOWER | ended("done", "0x120"), 90, True),
        ("HCacheNothingRestored", HITS | SLOWER | ended("done", "0+0.1x120"), 90, False),
        ("HCacheNothingRestored", HITS | ended("done", "0x120"), 90, False),
        ("HCacheNoRoom", ended("no_slots", "0+1x120"), 60, True),
        ("HCacheNoRoom", ended("no_slots", "0x50 2x70"), 60, False),
        ("HCacheCostsTime", seconds("saved", "0+1x120") | seconds("lost", "0+4x120"), 60, True),
        ("HCacheCostsTime", seconds("saved", "0+2x120") | seconds("lost", "0+1x120"), 60, False),
        ("HCacheCostsTime", seconds("saved", "0x120") | seconds("lost", "0x50 0.05x70"), 100, False),
        ("HCacheMetricsMissing", UP, 14, False),
        ("HCacheMetricsMissing", UP, 16, True),
        ("HCacheMetricsMissing", UP | INFO, 60, False),
        ("HCacheMetricsMissing", POD, 60, False),
        ("HCacheMetricsMissing", POD | WRONG_NAME, 16, True),
        ("HCacheMetricsMissing", POD | INFO, 60, False),
        ("HCacheRestoresFail", ended("done", "0+4x120") | ended("late", "0+1x120"), 60, True),
        ("HCacheRestoresFail", ended("done", "0+20x120") | ended("late", "0+1x120"), 60, False),
        ("HCacheRestoresFail", ended("done", "0x120") | ended("try_late", "0+1x120"), 60, False),
        ("HCacheRestoresFail", ended("done", "0x120") | ended("failed", "0x50 2x70"), 60, False),
    ],
)  # fmt: skip
def test_when_they_fire(
    tmp_path: Path, alert: str, series: dict[str, str], minutes: int, fires: bool
) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    found = [
        {"series": name if name.startswith(("up{", "sglang_")) else f"sglang:hcache_{name}", "values": values}
        for name, values in series.items()
    ]
    labels = f'{{alertname="{alert}", alertstate="firing", instance="a"}}'
    asked = {
        "expr": f"max by (alertname, alertstate, instance) (ALERTS{labels})",
        "eval_time": f"{minutes}m",
        "exp_samples": [{"labels": labels, "value": 1}] if fires else [],
    }
    case = {"interval": "1m", "input_series": found, "promql_expr_test": [asked]}
    path = tmp_path / "test.yml"
    path.write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [case]})
    )
    result = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
