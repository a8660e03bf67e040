"""Hooks on functions that another plugin has hooked already."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_hcache.core.errors import ConfigError
from sglang_hcache.sglang_plugin.seam import hooking

MODULE = "module_that_is_hooked"
CALLS: list[str] = []


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Has a function that another plugin has hooked when it was loaded, and one that nobody has."""
    CALLS.clear()
    module = ModuleType(MODULE)
    module.__dict__.update(first=lambda: CALLS.append("first"), second=lambda: CALLS.append("second"))
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    HookRegistry.register(f"{MODULE}.first", around("theirs"), HookType.AROUND)
    HookRegistry.apply_hooks()
    return module


def around(name: str) -> Callable[..., Any]:
    def hook(original: Callable[..., Any], *args: Any) -> Any:
        CALLS.append(name)
        return original(*args)

    return hook


def test_both_are_called_once(hooked: ModuleType) -> None:
    targets = {
        f"{MODULE}.{name}": (around(f"ours on {name}"), HookType.AROUND) for name in ("first", "second")
    }
    hooking.apply(targets)
    hooking.apply(targets)  # SGLang may configure a process twice
    hooked.first()
    hooked.second()
    assert CALLS == ["ours on first", "theirs", "first", "ours on second", "second"]


def test_what_is_replaced_is_said(hooked: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    hooking.apply({f"{MODULE}.first": (lambda: CALLS.append("ours"), HookType.REPLACE)})
    hooked.first()
    assert CALLS == ["ours"]
    assert "other plugins" in caplog.text


def test_a_function_that_is_not_there_is_an_error(hooked: ModuleType) -> None:
    with pytest.raises(ConfigError, match="third"):
        hooking.apply({f"{MODULE}.third": (around("ours"), HookType.AROUND)})


def test_what_others_have_imported_is_hooked_too(hooked: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is hooked; of methods nothing is searched for, for that takes long."""
    other = ModuleType("module_that_imports_from_it")
    other.__dict__.update(once=hooked.second, twice=hooked.first, kept=len)
    monkeypatch.setitem(sys.modules, other.__name__, other)
    hooked.Class = type("Class", (), {"method": lambda _self: CALLS.append("method")})  # type: ignore[attr-defined]
    other.alias = method = hooked.Class.method  # type: ignore[attr-defined]
    search = hook_registry._propagate_patch
    names = ("first", "second", "Class.method")
    hooking.apply({f"{MODULE}.{name}": (around("ours"), HookType.AROUND) for name in names})
    hooking.apply({f"{MODULE}.second": (around("ours again"), HookType.AROUND)})
    other.once()
    other.twice()
    hooked.Class().method()
    assert CALLS == ["ours again", "ours", "second", "ours", "theirs", "first", "ours", "method"]
    assert other.alias is method
    assert hook_registry._propagate_patch is search, "other plugins have SGLang's own"
