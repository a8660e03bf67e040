"""How SGLang's server is launched with the tier switched on, also on a machine without a GPU."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from sglang_hcache.cli.server.arguments import arguments_in_file, values_of, without
from sglang_hcache.cli.server.cpu_runtime import ensure_stub, has_gpu, usable_cores, variables_of_ranks
from sglang_hcache.cli.server.ports import try_to_listen
from sglang_hcache.core.config import TIER_FLAG, environment_with, tier_mode

_CPU_SETTINGS = (
    ("--device", "cpu"),
    ("--attention-backend", "torch_native"),
    ("--disable-overlap-schedule", None),
)
_MOST_DIGITS = 3  # of a number of ranks; the cores of a million would not fit into a variable


def _wants_cpu(arguments: Sequence[str], *, has_gpu: bool) -> bool:
    """Whether the server will run on the CPU: no GPU here, and no other device asked for; the last one counts."""
    return not has_gpu and all(device == "cpu" for device in values_of(arguments, "--device")[-1:])


def _num_ranks(arguments: Sequence[str]) -> int:
    """The number that ``--tp-size`` says; 1 where SGLang will refuse what it says."""
    sizes = values_of(arguments, "--tp-size", "--tensor-parallel-size", "--tp")
    last = (sizes or ["1"])[-1] or ""
    return int(last) if last.isdecimal() and len(last) <= _MOST_DIGITS else 1


def build_launch(
    arguments: Sequence[str], *, has_gpu: bool, stub_dir: Path
) -> tuple[list[str], dict[str, str]]:
    """The command that serves with SGLang's ``arguments``, and what to change in its environment.

    Our own additions come first, so that whatever the user gave wins, abbreviated or not. Over SGLang's file of
    ``--config`` they would win, so what is in it is not added. ``stub_dir`` is used on the CPU only.
    """
    given, in_file = list(arguments), arguments_in_file(arguments)
    added: list[str] = []
    environment: dict[str, str] = {}
    tier = [tier_mode(value) for value in values_of(given, TIER_FLAG)]
    is_in_file = bool(values_of(in_file, TIER_FLAG))
    if not tier and not is_in_file:
        added += [TIER_FLAG, "hcache"]
    elif tier[-1:] == ["off"] and not is_in_file:
        # Dropped, not passed on: `off` then works even where the plugin does not load.
        given = without(given, TIER_FLAG)
    if _wants_cpu([*in_file, *given], has_gpu=has_gpu):
        for flag, value in _CPU_SETTINGS:
            if not values_of([*in_file, *given], flag):
                added += [flag] if value is None else [flag, value]
        environment = {"SGLANG_USE_CPU_ENGINE": "1", "LD_LIBRARY_PATH": str(stub_dir)}
    # Without -P Python would look in the working folder first, which may be a checkout of SGLang or of ours.
    return [sys.executable, "-P", "-m", "sglang.launch_server", *added, *given], environment


def prepare_launch(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Command and whole environment of a server on this machine; builds the CPU stub where it is needed.

    Raises:
        ConfigError: this machine has no GPU and the stub cannot be built.
    """
    gpu = has_gpu()
    everything = [*arguments_in_file(arguments), *arguments]
    on_cpu = _wants_cpu(everything, has_gpu=gpu)
    folder = ensure_stub() if on_cpu else Path()
    command, changes = build_launch(arguments, has_gpu=gpu, stub_dir=folder)
    defaults: dict[str, str] = {}
    if on_cpu:
        # Restores must not wait for cores on which OpenMP's threads spin. Nor must a server without the tier spin,
        # which beside another busy process made it two to three times slower: with the tier's threads OpenMP spins
        # less, and a comparison would show a difference that has nothing to do with the tier.
        defaults = {"OMP_WAIT_POLICY": "passive"}
        if (num_ranks := _num_ranks(everything)) > 1:
            defaults |= variables_of_ranks(num_ranks, usable_cores())
    return command, environment_with(changes, defaults)


def port_in_use(arguments: Sequence[str]) -> str | None:
    """Where the server is meant to listen, if somebody does already; SGLang finds out once its model is loaded."""
    if values_of(arguments, "--config") and not values_of(arguments, "--port"):
        return None
    host = (values_of(arguments, "--host") or ["127.0.0.1"])[-1] or ""
    port = (values_of(arguments, "--port") or ["30000"])[-1] or ""
    try:
        try_to_listen(host, port)
    except (OSError, OverflowError) as error:
        return f"{host}:{port}" if getattr(error, "errno", None) == errno.EADDRINUSE else None
    return None


def become_server(arguments: Sequence[str]) -> NoReturn:
    """Become that server: same process id, so that signals reach it."""
    if (taken := port_in_use(arguments)) is not None:  # no error: until the model is loaded it may be free
        print(
            f"hcache: warning: {taken} is in use: if it still is when the model is loaded, this server ends then; "
            "--port names another",
            file=sys.stderr,
        )
    command, environment = prepare_launch(arguments)
    os.execvpe(command[0], command, environment)
