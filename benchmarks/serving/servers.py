"""One real server for each method of a comparison: same model, same KV pool, same cores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from common.model import load_arguments
from common.precision import precision
from common.terminal import while_doing
from sglang_hcache.cli.server.cpu_runtime import has_gpu
from sglang_hcache.cli.server.pair import launch_together
from sglang_hcache.cli.server.process import ServerProcess, settings_arguments
from sglang_hcache.core.config import host_size_for
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.sglang_plugin.launch.prefill_graphs import SIZES

OWN_METHODS = ("recompute", "kv", "hidden", "hybrid", "auto")
OTHER_METHODS = {
    "hicache": "SGLang's HiCache",
    "hicache-file": "SGLang's HiCache with its storage in files",
    "lmcache": "LMCache",
}
METHODS = (*OWN_METHODS, *OTHER_METHODS)
_FEWEST_CHUNKS = 17 * 2
"""That a host tier must have room for, with its buffers."""
_PREFILL_TOKENS = 4096
_LEAST_DISK = 2**28
_STARTUP_TIMEOUT_S = 600.0
_LARGEST_GRAPH = "32"


def parse_methods(text: str) -> tuple[str, ...]:
    """Names with commas between them, each once.

    Raises:
        ConfigError: an unknown one.
    """
    methods = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for method in methods:
        if method not in METHODS:
            raise ConfigError(f"--methods: {method!r} is not allowed; allowed: {', '.join(METHODS)}")
    return methods


def why_unavailable(method: str, *, gpu: bool) -> str | None:
    """Why ``method`` cannot be measured on a machine with or without a GPU; None if it can."""
    if method == "recompute":
        return None
    if method in OTHER_METHODS:
        if not gpu:
            return f"not available here: {OTHER_METHODS[method]} needs a GPU"
        if method == "lmcache":
            return "not available here: LMCache needs its own `lmcache server`, which this version does not start"
    return None


def reasons_unavailable(methods: Sequence[str]) -> dict[str, str]:
    """Those of ``methods`` that cannot be measured on this machine -> why."""
    gpu = has_gpu()
    return {method: why for method in methods if (why := why_unavailable(method, gpu=gpu)) is not None}


def measures_at_start(method: str) -> bool:
    """Whether a server with ``method`` times this machine when it starts: nothing else may start meanwhile."""
    return method in ("hybrid", "auto")


def device_arguments() -> list[str]:
    """Of servers that are compared: on a GPU one attention backend for all of them, and graphs of few sizes, the same
    for all, for each takes a part of a second to record. Larger batches and prefills run without one.
    """
    if not has_gpu():
        return []
    decode, prefill = (
        ["--cuda-graph-max-bs-decode", _LARGEST_GRAPH],
        ["--cuda-graph-bs-prefill", *map(str, SIZES)],
    )
    return ["--attention-backend", "triton", *decode, *prefill]


def arguments_without_tier() -> list[str]:
    """Of servers that the tier is compared with: SGLang as it is, but with the same fixes on a CPU."""
    return ["--hierarchical-cache", "off", *([] if has_gpu() else ["--hcache-cpu-fixes"])]


def restored(method: str) -> str:
    """``--hcache-restore`` of a server that is measured: what is to be compared with recomputing comes back always."""
    return "always" if method in ("hidden", "kv") else "faster"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSizes:
    """What all servers of a comparison have in common."""

    pool_tokens: int
    context_tokens: int
    """Longest prompt and answer."""
    staging_bytes: int
    """Part of ``host_bytes``."""
    host_bytes: int
    disk_bytes: int
    measure_s: float
    """For each thing that ``auto`` and ``hybrid`` measure at start."""
    io_engine: str = "posix"
    """For all alike: what each would choose by itself at its start may differ."""

    @property
    def hicache_gb(self) -> int:
        """Of HiCache, which takes whole gigabytes only."""
        return max(1, round(self.host_bytes / 1e9))

    def as_json(self) -> dict[str, Any]:
        names = ("pool_tokens", "host_bytes", "disk_bytes", "hicache_gb", "io_engine")
        return {name: getattr(self, name) for name in names}


def sizes_for(
    *,
    device_contexts: float,
    mean_context: float,
    longest_context: int,
    requests_at_once: bool,
    host_bytes: int,
    disk_bytes: int,
    kv_token_bytes: int,
    quick: bool,
) -> ServerSizes:
    """Sizes of the servers' caches.

    Args:
        device_contexts: contexts of ``mean_context`` tokens that the KV pool holds; at least the longest one fits.
        requests_at_once: whether a pass may have prompts of several.
        host_bytes: for chunks; what a server needs beside them is added.
        disk_bytes: 0: there is no disk tier.
        kv_token_bytes: K and V of one token.
    """
    pass_tokens = _PREFILL_TOKENS if requests_at_once else min(longest_context, _PREFILL_TOKENS)
    staging = 2 * (pass_tokens + CHUNK_TOKENS) * kv_token_bytes
    chunks = max(host_bytes, _FEWEST_CHUNKS * CHUNK_TOKENS * kv_token_bytes)
    return ServerSizes(
        pool_tokens=max(int(device_contexts * mean_context), longest_context * 5 // 4 + 2 * CHUNK_TOKENS),
        context_tokens=longest_context,
        staging_bytes=staging,
        host_bytes=host_size_for(staging, chunks),
        disk_bytes=max(disk_bytes, _LEAST_DISK) if disk_bytes else 0,
        measure_s=0.2 if quick else 1.0,
    )


def _server(method: str, folder: Path, model: Path, sizes: ServerSizes, logs: Path) -> ServerProcess:
    args = [
        *("--model-path", str(model), "--dtype", precision().dtype, *device_arguments()),
        *("--max-total-tokens", str(sizes.pool_tokens), "--chunked-prefill-size", str(_PREFILL_TOKENS)),
        *("--incremental-streaming-output", *load_arguments(model)),
        "--sleep-on-idle",  # the servers that are not asked leave the cores to the one that is
    ]
    environment = {}
    if method == "recompute":
        args += arguments_without_tier()
    elif method in OTHER_METHODS:
        args += [*arguments_without_tier(), "--enable-hierarchical-cache"]
        args += ["--hicache-size", str(sizes.hicache_gb), "--hicache-write-policy", "write_through"]
        if method == "hicache-file":
            args += ["--hicache-storage-backend", "file"]
            environment["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(folder / method)
    else:
        disk = {
            "dirs": [str(folder / method)],
            "disk_size": sizes.disk_bytes,
            "disk_free_floor": "256MiB",
            "segment_size": min(32 * 2**20, sizes.disk_bytes // 8),
        }
        settings = {
            **(disk if sizes.disk_bytes else {}),
            "host_size": sizes.host_bytes,
            "staging_size": sizes.staging_bytes,
            "method": method,
            "restore": restored(method),
            "io_engine": sizes.io_engine,
            "measure_s": sizes.measure_s,
        }
        args += settings_arguments(folder / f"{method}.yaml", settings)
    return ServerProcess(
        args,
        log=logs / f"{method}.log",
        extra_env=environment,
        startup_timeout_s=_STARTUP_TIMEOUT_S,
    )


@contextlib.contextmanager
def running_servers(
    methods: Sequence[str],
    folder: Path,
    model: Path,
    sizes: ServerSizes,
    progress: Progress,
    logs: Path | None,
) -> Iterator[dict[str, ServerProcess]]:
    """A server for each method that is available, all of them up; none is left at the end.

    Args:
        folder: for the disk tiers, configuration files and, where ``logs`` is None, logs.

    Raises:
        ConfigError: this machine cannot run a server, or not with these sizes.
        ServerProcessError: one did not start.
    """
    unavailable = reasons_unavailable(methods)
    chosen = [method for method in methods if method not in unavailable]
    servers = {method: _server(method, folder, model, sizes, logs or folder) for method in chosen}
    together = [method for method in chosen if not measures_at_start(method)]
    batches = [together, *([method] for method in chosen if measures_at_start(method))]
    try:
        for batch in filter(None, batches):
            with while_doing(progress, f"starting servers: {', '.join(batch)}"):
                launch_together([servers[method] for method in batch])
        yield servers
    finally:
        for server in servers.values():
            server.kill()
