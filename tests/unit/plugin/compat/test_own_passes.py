"""Forward passes outside the scheduler's batches."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, happened: list[str]) -> None:
        super().__init__()
        self._happened = happened

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, _batch: Any) -> None:
        self._happened.append(f"{len(input_ids)} tokens from {int(positions[0])}")


@pytest.mark.parametrize("enable_lora", [False, None, True])
def test_no_adapter_of_the_pass_before_works_on_them(enable_lora: bool | None) -> None:
    from sglang_hcache.sglang_plugin.compat.v0_5_17.forward import ForwardOf

    happened: list[str] = []
    table = SimpleNamespace(req_to_token=torch.zeros(1, 100, dtype=torch.int32))
    runner = SimpleNamespace(
        model=Model(happened),
        model_config=SimpleNamespace(num_hidden_layers=1),
        device="cpu",
        attn_backend=SimpleNamespace(init_forward_metadata=lambda _batch: None),
        req_to_token_pool=table,
        server_args=SimpleNamespace(enable_lora=enable_lora),
    )
    if enable_lora:
        runner.lora_manager = SimpleNamespace(reset_lora_batch=lambda: happened.append("reset"))
    forward = ForwardOf(runner)
    slots = torch.arange(10, 40)
    forward.extend(array("q", range(30)), slots, 20, 1)
    assert happened == [*(["reset"] if enable_lora else []), "10 tokens from 20"]
    assert table.req_to_token[0, :30].tolist() == slots.tolist()
