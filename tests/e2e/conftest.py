"""Models, made once a test run, and the environment of what the tests start."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from sglang_hcache.cli.server.launch import prepare_launch
from sglang_hcache.cli.tiny_model.model import FAMILIES, TinyModel
from sglang_hcache.cli.tiny_model.write import write_tiny_model
from tests.e2e.harness import PLUGINS, TierServer
from tests.e2e.plugins.hcache_forks import ForkServer, forking_popen
from tests.patched_sglang import installed_sglang

_OF_THE_TIER = re.compile(r"hcache|WARN|ERROR|Traceback|Prefill batch|flush")
_MOST_LINES = 60


@pytest.fixture(scope="package", autouse=True)
def faster_imports() -> Iterator[None]:
    """In whatever is started: no models that no test serves, and what ``plugins/sitecustomize.py`` does."""
    families = "|".join(["Transformers", *(family.prefix for family in FAMILIES.values())])
    is_served = re.compile(rf"^class ({families})(ForCausalLM|LMHeadModel)\(", re.MULTILINE)
    models = (installed_sglang() / "srt" / "models").glob("*.py")
    others = sorted(path.stem for path in models if not is_served.search(path.read_text()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_DISABLED_MODEL_ARCHS", ",".join(others))
        patch.setenv("PYTHONPATH", str(PLUGINS), prepend=os.pathsep)
        patch.setenv("HCACHE_TEST_FORK", "1")
        yield


@pytest.fixture(scope="package", autouse=True)
def forked_programs(faster_imports: None) -> Iterator[None]:
    """Servers, commands and benchmarks: see ``plugins/hcache_forks.py``."""
    _, environment = prepare_launch([])
    forks = ForkServer(environment)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", forking_popen(forks))
        yield
    forks.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds a small random model; equal arguments give the same folder."""
    made: dict[TinyModel, Path] = {}

    def build(**fields: object) -> Path:
        spec = TinyModel(**fields)  # type: ignore[arg-type]
        if spec not in made:
            made[spec] = tmp_path_factory.mktemp("model")
            write_tiny_model(made[spec], spec)
        return made[spec]

    return build


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails shows what its servers logged of the tier, for whoever reads of it has that output only."""
    report = yield
    if report.failed:
        for name, server in getattr(item, "funcargs", {}).items():
            if isinstance(server, TierServer):
                said = [
                    line for line in server.process.log.read_text().splitlines() if _OF_THE_TIER.search(line)
                ]
                report.sections.append(
                    (f"{name}: what it logged", "\n".join(line[:300] for line in said[-_MOST_LINES:]))
                )
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("exact_times") and not config.getoption("exact_times"):
            item.add_marker(pytest.mark.skip(reason="runs with --exact-times"))
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
