"""Two requests of one id at a time: SGLang's tokenizer processes do not know of each other's."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.plugin.test_weights_in_use import Served, served  # noqa: F401  # a fixture

ANOTHER_PREFIX = array("q", range(500, 564))
TOKENS = array("q", range(64))


def request(prefix: array[int], *, store: bool = True) -> Any:
    """What is read of SGLang's request "r", whose first tokens are on the device."""
    absent = (
        *("input_embeds", "positional_embed_overrides", "multimodal_inputs", "token_type_ids"),
        *("multi_item_delimiter_indices", "lora_id", "session", "extra_key"),
    )
    return SimpleNamespace(
        **dict.fromkeys(absent),
        rid="r",
        sampling_params=SimpleNamespace(custom_params={"hcache_store": store}),
        full_untruncated_fill_ids=prefix + TOKENS,
        prefix_indices=list(prefix),
    )


@pytest.fixture
def begin(served: Served) -> Callable[..., bool]:  # noqa: F811
    """A pass with these requests is prepared; says whether anything of their id is saved."""
    from sglang_hcache.sglang_plugin.compat.v0_5_17.batches import begin_captures

    def prepare(*requests: Any) -> bool:
        begin_captures(SimpleNamespace(reqs=requests), served.bridge)  # type: ignore[arg-type]
        return served.bridge.is_capturing("r")

    return prepare


def leave(served: Served, request: Any) -> None:  # noqa: F811
    """As the radix cache does for a request that is over."""
    served.bridge.end_capture("r")
    served.bridge.ids.leaves("r", id(request))


@pytest.mark.parametrize("store", [True, False])
def test_nothing_is_saved_while_there_are_two(served: Served, begin: Any, store: bool) -> None:  # noqa: F811
    first, second, third = request(array("q")), request(ANOTHER_PREFIX, store=store), request(array("q"))
    assert begin(first)
    assert not begin(second)
    assert not begin(first), "its next piece"
    leave(served, first)
    assert not begin(third)
    leave(served, second)
    assert begin(third), "alone again"
    leave(served, third)
    assert not served.bridge.is_capturing("r")


def test_rows_of_one_are_not_taken_for_those_of_the_other(served: Served, begin: Any) -> None:  # noqa: F811
    """The second goes on where the first ends, behind another prefix: its rows would be the first's next chunk."""
    begin(request(array("q")), request(ANOTHER_PREFIX))
    rows = torch.zeros(128, dtype=torch.int64)
    assert not served.bridge.begin_pass(["r", "r"], rows, rows)
