"""CUDA graphs for prefill: of how many tokens, and what the log of a server on a GPU says of them."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from sglang_hcache.plan.shapes import ModelShape

logger = logging.getLogger(__name__)

SIZES = (4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens. SGLang has 58, each of which takes a part of a second to record; it replays none that would be less than half
full. To compute a longer prefill takes longer than to launch its kernels one by one."""
_MOST_ROWS_BYTES = 512_000_000
"""For hidden states of the largest pass of ``SIZES``. The larger a model is, the shorter are passes that gain."""


def choose_sizes(args: argparse.Namespace) -> None:
    """Few, where the user gives none. The backend is left to SGLang: it tests a default one, but not a given one."""
    given = (args.cuda_graph_config or {}).get("prefill", {})  # JSON, which wins over other arguments
    if given.get("bs") or args.cuda_graph_bs_prefill:
        return
    most = given.get("max_bs") or args.cuda_graph_max_bs_prefill or max(SIZES)
    args.cuda_graph_bs_prefill = [size for size in SIZES if size <= most]


def limit_sizes(prefill: Any, shape: ModelShape, largest_pass: int, *, stores_hidden: bool) -> None:
    """Leave out what would take too much device memory for hidden states of all layers, or is never run.

    Args:
        prefill: SGLang's settings of the phase; they are changed.
        largest_pass: tokens.
        stores_hidden: whether hidden states may be stored, of any layer.
    """
    sizes = prefill.bs or []
    if str(prefill.backend) == "disabled" or not sizes:
        return
    most = max(SIZES)
    if max(sizes) > most:
        logger.warning(
            "hcache: CUDA graphs for prefills of more than %s tokens are not recorded: their buffers would take device "
            "memory from the KV pool, and such prefills gain nothing from a graph. Set --cuda-graph-max-bs-prefill %d "
            "or less to avoid this line",
            f"{most:,}",
            most,
        )
    if tuple(sizes) == SIZES:
        enough = next((size for size in SIZES if size >= largest_pass), most)
        row_bytes = shape.num_layers * shape.hidden_row_bytes
        most = min(enough, _MOST_ROWS_BYTES // row_bytes) if stores_hidden else enough
    prefill.bs = [size for size in sizes if size <= most]
    if not prefill.bs:
        prefill.backend = "disabled"


def log_line(most_tokens: int) -> str:
    """What CUDA graphs do for prefill.

    Args:
        most_tokens: of the longest prefill that a graph runs; 0: none does.
    """
    if most_tokens:
        return f"hcache: CUDA graphs run prefills of up to {most_tokens:,} tokens"
    return (
        "hcache: CUDA graphs for prefill are off: a prefill of few tokens, such as the rest of a prompt behind a hit, "
        "takes longer, up to twice as long. SGLang records none with --disable-prefill-cuda-graph, for some models, "
        "and with less than 4 GiB of device memory free: lower --mem-fraction-static"
    )
