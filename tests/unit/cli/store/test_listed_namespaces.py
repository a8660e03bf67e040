"""``hcache store ls --namespaces`` in windows of several widths."""

from __future__ import annotations

import time
from typing import cast

import pytest
from rich.console import Console

from sglang_hcache.cli.store.lists import list_namespaces
from sglang_hcache.store.inspect.view import NamespaceInfo, StoreView

OWNER = {
    "model": "Llama-3.1-8B[bold][/x]",
    "weights": "0123abcd",
    "tenant": "deadbeef",
    "adapter": "[red]mine",
}


class View:
    """Stands for a store's view."""

    def namespaces(self) -> list[NamespaceInfo]:
        at = time.time() - 100
        return [
            NamespaceInfo(bytes(range(first, first + 16)), 12_345, 1234, 123_400_000_000, at, at, owner)
            for first, owner in ((0, OWNER), (1, {}))
        ]


def listed(width: int) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(list_namespaces(cast(StoreView, View()), 0).parts[0])
    return capture.get()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_what_other_commands_are_given_is_never_cut(width: int) -> None:
    shown = listed(width)
    for namespace in View().namespaces():
        [line] = [line for line in shown.splitlines() if line.startswith(namespace.namespace_id.hex() + " ")]
        assert {"12,345", "1,234", "123.4"} <= set(line.split())
    assert "…" not in shown


def test_brackets_in_names_are_no_markup() -> None:
    shown = listed(200)
    assert OWNER["model"] in shown
    assert OWNER["adapter"] in shown
