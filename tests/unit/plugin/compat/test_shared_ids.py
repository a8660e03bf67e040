"""Two requests of one id at a time: a client uses it again while SGLang still runs the request that had it first.

SGLang's tokenizer processes, where there are several, do not know of each other's either.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hcache.capture.events import RequestRows
from sglang_hcache.core.keys import Namespace, chunk_keys
from tests.unit.plugin.serving.test_weights_in_use import LAYOUT, Served

FIRST, OTHER = array("q", range(64)), array("q", range(100, 164))
END = array("q", range(200, 264))
ROOT = Namespace(b"model", "a").root_key()


class Serving(Served):
    """SGLang's passes over requests with plain tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Any] = []
        """All: whoever runs has an identity of its own."""

    def request(self, tokens: array[int], *, cached: int = 0, is_saved: bool = True) -> Any:
        """Named ``again``, with ``cached`` of its tokens on the device."""
        more = ("input_embeds", "positional_embed_overrides", "multimodal_inputs", "token_type_ids")
        made = SimpleNamespace(
            rid="again",
            extra_key=None,
            full_untruncated_fill_ids=tokens,
            prefix_indices=range(cached),
            sampling_params=SimpleNamespace(custom_params={"hcache_store": is_saved}),
            **dict.fromkeys([*more, "multi_item_delimiter_indices", "lora_id", "session"]),
        )
        self.requests.append(made)
        return made

    def end(self, request: Any) -> None:
        """As the radix cache does for a request that is over."""
        self.bridge.saving.end("again")
        self.bridge.saving.ids.leaves("again", id(request))

    def prefill(self, request: Any) -> None:
        from sglang_hcache.sglang_plugin.compat.v0_5_17.batches import begin_captures

        begin_captures(SimpleNamespace(reqs=[request]), self.bridge)  # type: ignore[arg-type]
        first = len(request.prefix_indices)
        self.compute(request.full_untruncated_fill_ids[first:], first)

    def compute(self, tokens: array[int], first: int) -> None:
        """A pass over ``tokens``, from position ``first`` on."""
        ids = torch.tensor(tokens)
        if self.bridge.saving.begin_pass(["again"], ids, ids):
            for layer in range(LAYOUT.num_layers):
                self.bridge.saving._passes.on_layer(layer, torch.zeros(len(tokens), 1))
            self.bridge.saving.end_pass(
                [RequestRows("again", first, 0, len(tokens))], is_typical=True, is_replayed=False
            )

    def stored_chunks(self, tokens: array[int]) -> int:
        self.bridge.close()
        return self.bridge.tiers.match(chunk_keys(ROOT, tokens))


@pytest.fixture
def serving() -> Iterator[Serving]:
    made = Serving()
    yield made
    made.bridge.close()


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)])
def test_rows_of_one_do_not_continue_the_other(serving: Serving, first: bool, second: bool) -> None:
    """The second one is computed from where the first one has come to, behind other tokens."""
    serving.prefill(serving.request(FIRST, is_saved=first))
    serving.prefill(serving.request(OTHER + END, cached=64, is_saved=second))
    assert serving.stored_chunks(FIRST + END) == first


def test_what_decodes_does_not_continue_what_came_later(serving: Serving) -> None:
    """The first one is not saved, and not announced again when it goes on."""
    serving.prefill(serving.request(FIRST, is_saved=False))
    serving.prefill(serving.request(OTHER))
    serving.compute(END, 64)
    assert serving.stored_chunks(OTHER + END) == 0


def test_when_the_first_one_is_over_the_second_one_is_saved(serving: Serving) -> None:
    old, new = serving.request(FIRST), serving.request(OTHER)
    serving.prefill(old)
    serving.prefill(new)
    serving.end(old)
    new.full_untruncated_fill_ids, new.prefix_indices = OTHER + END, range(64)  # its next piece
    serving.prefill(new)
    serving.end(new)
    keys = chunk_keys(ROOT, OTHER + END)
    serving.bridge.close()
    assert [key in serving.bridge.tiers for key in keys] == [False, True]
