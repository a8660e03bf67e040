"""What is installed in a scheduler's process, by what the server was started with."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """SGLang's functions that would have been hooked, by name, and how; nothing is."""
    from sglang_hcache.sglang_plugin import hooks
    from sglang_hcache.sglang_plugin.seam import hooking

    hooked: dict[str, object] = {}
    monkeypatch.setattr(hooking, "apply", hooked.update)
    monkeypatch.setattr(hooks, "register_radix_cache_backend", lambda *_: None)
    return hooked


def configure(device: str, *, tier: bool = False, cpu_fixes: bool = False) -> None:
    """As a scheduler's process does after ``ServerArgs.from_cli_args`` has seen these flags."""
    from sglang_hcache.sglang_plugin import entry
    from sglang_hcache.sglang_plugin.launch import flags

    parsed = Namespace(
        hierarchical_cache="off",
        hcache_cpu_fixes=cpu_fixes,
        hicache_storage_backend=None,
        hicache_storage_backend_extra_config=None,
    )
    carried = entry._from_arguments(
        lambda _, args: args.hicache_storage_backend_extra_config, SimpleNamespace, parsed
    )
    entry._configure_scheduler(
        SimpleNamespace(
            radix_cache_backend=flags.BACKEND if tier else None,
            hicache_storage_backend_extra_config=carried,
            device=device,
        )
    )


def test_nothing_without_the_tier(installed: dict[str, object]) -> None:
    configure("cpu")
    assert not installed


def test_the_fixes_alone_if_they_are_asked_for(installed: dict[str, object]) -> None:
    configure("cpu", cpu_fixes=True)
    assert sorted(name.rpartition(".")[2] for name in installed) == [
        "_run_sdpa_forward_extend",
        "alloc_decode",
        "alloc_extend",
        "init_model_parallel_group",
    ]


@pytest.mark.parametrize("asked", [{"tier": True}, {"cpu_fixes": True}])
@pytest.mark.parametrize("version", ["0.5.18", "0.5.17.post1", "0.5.1", None])
def test_another_release_of_sglang_is_refused(
    installed: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    asked: dict[str, bool],
    version: str | None,
) -> None:
    """In a scheduler's process as well: an offline ``Engine`` may have its arguments from elsewhere."""

    def version_of(_name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(metadata, "version", version_of)
    with pytest.raises(SystemExit) as stop:
        configure("cpu", **asked)
    assert stop.value.code == 2
    assert not installed
    said = capsys.readouterr().err
    assert f"SGLang {version or 'of unknown version'} is installed" in said
    assert "works with SGLang 0.5.17 only" in said


def test_without_the_tier_any_release_will_do(
    installed: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _name: "0.6.0")
    configure("cpu")
    assert not installed


def test_a_build_of_the_release_is_the_release(
    installed: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _name: "0.5.17+cu130")
    configure("cpu", tier=True)
    assert installed


def test_the_command_line_of_another_release_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before SGLang makes anything of it."""
    from sglang_hcache.sglang_plugin import entry

    def construct(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(metadata, "version", lambda _name: "0.5.18")
    with pytest.raises(SystemExit) as stop:
        entry._from_arguments(construct, SimpleNamespace, Namespace(hierarchical_cache="hcache"))
    assert stop.value.code == 2
    assert "--hierarchical-cache: SGLang 0.5.18 is installed" in capsys.readouterr().err


def test_the_tier_brings_the_fixes(installed: dict[str, object]) -> None:
    configure("cpu", tier=True)
    assert any(name.endswith("get_internal_state") for name in installed)
    fixes = ("_forward_extend", "alloc_decode", "alloc_extend", "init_model_parallel_group")
    assert sum(name.endswith(fixes) for name in installed) == 4


def test_before_weights_change_the_tier_is_told(installed: dict[str, object]) -> None:
    """However they come: K and V of the old ones, saved or restored as the new ones', would be wrong."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.plugins.hook_registry import HookType

    from sglang_hcache.sglang_plugin import hooks

    configure("cpu", tier=True)
    updates = [
        name for name in vars(SchedulerWeightUpdaterManager) if name.startswith("update_weights_from_")
    ]
    assert len(updates) == 4
    for name in (*updates, "release_memory_occupation"):
        assert installed[f"{hooks._WEIGHTS}.{name}"] == (hooks._weights_will_change, HookType.BEFORE)
    checks = installed[f"{hooks._WEIGHTS}.check_weights"]
    assert checks == (hooks._weights_will_be_checked, HookType.BEFORE)


@pytest.mark.parametrize("tier", [False, True])
def test_no_fix_on_another_device(installed: dict[str, object], tier: bool) -> None:
    configure("cuda", tier=tier, cpu_fixes=not tier)
    assert not any(
        part in name for name in installed for part in ("attention", "allocator", "parallel_group")
    )
    assert bool(installed) == tier


def test_hcache_flags_lists_what_a_server_takes() -> None:
    from sglang_hcache.cli.flags import describe
    from sglang_hcache.sglang_plugin.launch import flags

    parser = ArgumentParser(add_help=False)
    flags.add_arguments(parser)
    taken = {option for action in parser._actions for option in action.option_strings}
    assert taken == {setting.flag for setting in describe() if setting.flag is not None}


def test_a_process_without_the_tier_loads_next_to_nothing_of_ours() -> None:
    """As SGLang does in its detokenizer, and then in a scheduler's process."""
    code = """if True:
        import sys
        from types import SimpleNamespace
        from unittest.mock import MagicMock

        for name in ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.plugins.hook_registry"):
            sys.modules[name] = MagicMock()  # imports of SGLang's take seconds, and are its own
        from sglang_hcache.sglang_plugin import entry

        def loaded() -> list[str]:
            return sorted(name for name in sys.modules if name.startswith("sglang_hcache."))

        entry.register()
        print(*loaded())
        off = SimpleNamespace(radix_cache_backend=None, hicache_storage_backend_extra_config=None)
        entry._configure_scheduler(off)
        print(*{name.split(".")[1] for name in loaded() if "sglang_plugin" not in name})
        print(*[name for name in loaded() if "sglang_plugin." in name])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    plugin = "sglang_hcache.sglang_plugin"
    assert done.stdout.splitlines() == [
        f"{plugin} {plugin}.entry",
        "core",
        f"{plugin}.entry {plugin}.launch {plugin}.launch.flags {plugin}.seam {plugin}.seam.release",
    ]
