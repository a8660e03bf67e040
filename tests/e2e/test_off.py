"""A server without ``--hierarchical-cache hcache`` is SGLang as it was, although the plugin is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import TierServer, random_prompt


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
        log = server.process.log_text()
        assert "impl=RadixCache " in log
        # Only the flags and the switch that looks for our backend are hooked.
        hooked = {
            line.split(" to ")[1].split(" ")[0]
            for line in log.splitlines()
            if "Applied " in line and "hook(s) to" in line
        }
        assert all(
            name.endswith(("add_cli_args", "from_cli_args", "configure_scheduler_process", "publish"))
            for name in hooked
        )
