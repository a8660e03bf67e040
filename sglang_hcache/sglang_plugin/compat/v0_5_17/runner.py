"""SGLang 0.5.17: its ``ModelRunner`` beside the CPU, before the KV pool is sized and graphs are recorded."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import (
    PrefillCudaGraphRunner,
    _resolve_transformer_layer_model,
)
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import is_in_breakable_cuda_graph
from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
    get_tc_piecewise_forward_context,
)
from sglang.srt.utils import cpu_has_amx_support
from torch import distributed

from sglang_hcache.core.layout import PlanKind
from sglang_hcache.core.units import format_bytes
from sglang_hcache.device.streams import CudaStreams, stream_that_goes_first
from sglang_hcache.sglang_plugin.seam.computation import computation_of, quantization_of
from sglang_hcache.sglang_plugin.seam.gpu import DeviceBuffers
from sglang_hcache.sglang_plugin.seam.model import ServedModel
from sglang_hcache.sglang_plugin.seam.ranks import Alone, Ranks, Together

logger = logging.getLogger(__name__)

_PATIENCE_S = 1800.0
"""With a rank that does not answer: at start it may have to look through a large store. One that hangs while a
batch runs SGLang's watchdog ends sooner."""


def device_buffers(runner: Any, method: PlanKind) -> DeviceBuffers | None:
    """Memory on the device of ``runner``, whose model is loaded; None on a CPU.

    Its forward passes get a stream that goes before those of restores. SGLang's own has the lowest priority, and nobody
    else has it yet.

    Raises:
        ConfigError: the tier does not support the model.
    """
    if runner.device == "cpu":
        return None
    device = torch.device(runner.device, runner.gpu_id)
    runner.forward_stream = stream_that_goes_first(device)
    streams = partial(CudaStreams, device, [runner.forward_stream])
    server_args = runner.server_args
    _leave_prefill_eager(runner.model, server_args.cuda_graph_config.prefill)
    runner.configure_kv_cache_dtype()  # as SGLang does a little later: a checkpoint may ask for FP8
    model = served_model(runner, runner.kv_cache_dtype)
    most = _most_replayed(server_args)
    buffers = DeviceBuffers.take(streams, model, method, most, records_prefill, records_one_graph)
    logger.info("hcache: %s of device memory for transfer buffers", format_bytes(buffers.num_bytes))
    return buffers


def served_model(runner: Any, kv_dtype: torch.dtype) -> ServedModel:
    """The loaded model of ``runner``.

    Args:
        kv_dtype: of K and V in its pool.

    Raises:
        ConfigError: the tier does not support it.
    """
    server_args, config = runner.server_args, runner.model_config
    return ServedModel.of(
        runner.model,
        config,
        kv_dtype,
        quantization_of(config, server_args.torchao_config),
        computation_of(server_args, has_amx=runner.device == "cpu" and cpu_has_amx_support()),
        has_adapters=server_args.enable_lora,
        ranks=runner.hcache_ranks,
    )


def ranks_of(runner: Any) -> Ranks:
    """Those that compute the model of ``runner`` together. All of them call this at the same time."""
    ranks = runner.tp_group.ranks
    if len(ranks) == 1:
        return Alone()
    return Together(distributed.new_group(ranks, timeout=timedelta(seconds=_PATIENCE_S), backend="gloo"))


def longest_replayed_prefill(runner: Any) -> int:
    """Tokens; 0: SGLang has recorded none, whatever it was asked for."""
    graphs = runner.prefill_cuda_graph_runner  # or SGLang's runner without graphs, or None
    return int(graphs.max_num_tokens) if isinstance(graphs, PrefillCudaGraphRunner) else 0


def records_prefill() -> bool:
    """Whether the forward pass that runs is one of ``PrefillCudaGraphRunner``, whatever its backend."""
    return get_tc_piecewise_forward_context() is not None


def records_one_graph() -> bool:
    """Whether a decode pass that is recorded becomes one CUDA graph: its backend is ``full``, not ``breakable``.

    The latter ends a graph where attention begins, between our hooks, when work that was forked has to be over.
    """
    return not records_prefill() and not is_in_breakable_cuda_graph()


def capture_first(
    original: Callable[..., Any], group: Any, graph_capture_context: Any = None, stream: Any = None
) -> Any:
    """AROUND hook of ``GroupCoordinator.graph_capture``: record on a stream that goes before those of restores.

    torch instantiates graphs with ``cudaGraphInstantiateFlagUseNodePriority``: a kernel keeps the priority of the
    stream that it was recorded on, whichever stream the graph is replayed on.
    """
    if graph_capture_context is None and stream is None:
        stream = stream_that_goes_first(group.device)
    return original(group, graph_capture_context, stream)


def schedule_first(original: Callable[..., None], scheduler: Any) -> None:
    """AROUND hook of ``dispatch_event_loop``: prepare batches on a stream that goes before those of restores.

    A pass waits for the small kernels that prepare it. On SGLang's own stream, which has the lowest priority, they may
    queue behind a restore's products.
    """
    forward = scheduler.forward_stream
    stream = stream_that_goes_first(forward.device, [forward])
    stream.wait_stream(scheduler.schedule_stream)
    scheduler.schedule_stream = stream
    with scheduler.device_module.StreamContext(stream):
        original(scheduler)


def _most_replayed(server_args: Any) -> int:
    """Rows of the largest pass that SGLang records; 0: it records none."""
    phases = (server_args.cuda_graph_config.decode, server_args.cuda_graph_config.prefill)
    return max((max(phase.bs or (0,)) for phase in phases if str(phase.backend) != "disabled"), default=0)


def _leave_prefill_eager(model: Any, prefill: Any) -> None:
    """Where SGLang would fail to record prefills of ``model``, and end. It reads ``prefill``, its settings, later."""
    if str(prefill.backend) == "disabled":
        return
    try:
        forward = _resolve_transformer_layer_model(model).forward
    except RuntimeError:  # it records none then
        prefill.backend = "disabled"
        return
    if not _takes_what_is_recorded(forward):
        prefill.backend = "disabled"
        logger.warning(
            "hcache: no CUDA graphs for prefill: SGLang 0.5.17 cannot record those of %s",
            type(model).__name__,
        )


def _takes_what_is_recorded(forward: Callable[..., Any]) -> bool:
    """Whether it is called with tokens, positions, the batch and embeddings, in this order."""
    try:
        bound = inspect.signature(forward).bind(None, None, None, None)
    except TypeError:
        return False
    return list(bound.arguments)[2:3] == ["forward_batch"]
