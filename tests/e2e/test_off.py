"""A server without ``--hierarchical-cache hcache`` is SGLang as it was, although the plugin is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import TierServer, random_prompt
from tests.patched_sglang import installed_sglang

OURS = {"add_cli_args", "from_cli_args", "configure_scheduler_process"}
"""The flags, and where the tier would be installed."""
OF_THE_TESTS = {"publish", "forward", "update_weights_from_disk"}
"""Hooked by ``plugins/hcache_test_plugin.py``."""


@pytest.fixture(autouse=True)
def processes_as_sglang_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not forked."""
    monkeypatch.delenv("HCACHE_TEST_FORK")


def test_the_plugin_changes_nothing_when_off(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    arguments = ["--model-path", str(tiny_model()), "--dtype", "float32", "--max-total-tokens", "2048"]
    with TierServer(tmp_path, [*arguments, "--hierarchical-cache", "off"]) as server:
        prompt = random_prompt(1, 500)
        first = server.ask(prompt)
        # SGLang's own radix cache, with its own matching: all but the last token, not whole chunks.
        again = server.ask(prompt)
        assert (again.device, again.restored) == (499, 0)
        assert again.tokens == first.tokens
        server.flush_device()
        assert server.ask(prompt).cached == 0
        assert "hcache" not in server.internal_state()
        assert "impl=RadixCache " in server.process.log_text()
        assert server.hooked_functions(installed_sglang()) == OURS | OF_THE_TESTS
