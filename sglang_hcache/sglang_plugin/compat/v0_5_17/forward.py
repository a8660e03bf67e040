"""Forward passes outside the scheduler's batches: for checks and measurements at start, and to recompute layers."""

from __future__ import annotations

import time
from array import array
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_hcache.sglang_plugin.seam.model import attention_cores, attention_end, decoder_layer

_PADDING_ROW = 0
"""A row of the request table: no request gets it, and what padded requests read there is thrown away."""


class _FarEnough(Exception):  # noqa: N818 (no error)
    """The last module that was asked for has run."""


class ForwardOf:
    """Single sequences, between the scheduler's own passes."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        cores = attention_cores(runner.model)
        self._num_layers = runner.model_config.num_hidden_layers
        self._ends = tuple(attention_end(runner.model, path) for path in cores)
        self._last_layer = decoder_layer(runner.model, list(cores)[-1]) if cores else None

    def extend(
        self,
        tokens: array[int],
        slots: torch.Tensor,
        start: int,
        num_layers: int,
        positions: torch.Tensor | None = None,
    ) -> float:
        last = self._last_layer if num_layers == self._num_layers else self._ends[num_layers - 1]
        batch = _extend_batch(
            tokens[start:].tolist(), _PADDING_ROW, slots[start:], start, self._runner.device
        )
        if positions is not None:
            batch.positions = positions.to(batch.positions)
        return self._run(batch, slots, last)

    @torch.inference_mode()
    def _run(self, batch: ForwardBatch, slots: torch.Tensor, last: torch.nn.Module | None) -> float:
        """Run the model until ``last`` of its modules has run: all models have layers, few have a way to stop.

        Returns the seconds on the device.
        """
        # Passes of the scheduler's that a GPU still works on use the same memory of the attention backend; and who
        # asked for this one takes the time.
        self._await_passes()
        began = time.monotonic()
        table = self._runner.req_to_token_pool.req_to_token
        table[_PADDING_ROW, : len(slots)] = slots.to(torch.int32)
        stop = last.register_forward_hook(_stop) if last is not None else None
        try:
            if self._runner.server_args.enable_lora:
                self._runner.lora_manager.reset_lora_batch()  # SGLang prepares it anew before each pass of its own
            with forward_context(ForwardContext(attn_backend=self._runner.attn_backend)):
                self._runner.attn_backend.init_forward_metadata(batch)
                self._runner.model.forward(batch.input_ids, batch.positions, batch)
        except _FarEnough:
            pass
        finally:
            if stop is not None:
                stop.remove()
            self._await_passes()
        return time.monotonic() - began

    def _await_passes(self) -> None:
        """Not the whole device: it may be at a restore, whose other layers this pass is for."""
        device = self._runner.device
        if device != "cpu":
            for stream in (self._runner.forward_stream, torch.get_device_module(device).current_stream()):
                stream.synchronize()


def _stop(*_: object) -> None:
    raise _FarEnough


def _extend_batch(tokens: list[int], row: int, slots: torch.Tensor, start: int, device: Any) -> ForwardBatch:
    count = len(tokens)
    lengths = torch.tensor([start + count], device=device)
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.tensor(tokens, dtype=torch.int64, device=device),
        req_pool_indices=torch.tensor([row], dtype=torch.int64, device=device),
        seq_lens=lengths,
        seq_lens_cpu=lengths.cpu(),
        seq_lens_sum=start + count,
        out_cache_loc=slots,
        positions=torch.arange(start, start + count, device=device),
        extend_num_tokens=count,
        extend_seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
        extend_prefix_lens=torch.tensor([start], dtype=torch.int32, device=device),
        extend_start_loc=torch.zeros(1, dtype=torch.int32, device=device),
        extend_seq_lens_cpu=[count],
        extend_prefix_lens_cpu=[start],
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
