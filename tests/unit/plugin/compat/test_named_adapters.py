"""What adapters are known by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import torch

from sglang_hcache.sglang_plugin.seam.ranks import Alone, Ranks


def adapter(scaling: float = 2.0, value: float = 1.0, name: str = "qkv_proj.lora_A.weight") -> Any:
    """Like SGLang's ``LoRAAdapter``."""
    first, second = ({name: torch.full((4, 8), value)}, {name: torch.ones(4, 8)})
    return SimpleNamespace(
        scaling=scaling,
        layers=[SimpleNamespace(weights=first), SimpleNamespace(weights=second)],
        embedding_layers={"embed_tokens.lora_embedding_A": torch.ones(4, 8)},
        added_tokens_embeddings={},
    )


def adapters_of(loras: dict[str, Any], ranks: Ranks | None = None) -> Any:
    from sglang_hcache.sglang_plugin.compat.v0_5_17.adapters import AdaptersOf

    return AdaptersOf(SimpleNamespace(loras=loras), ranks or Alone())  # type: ignore[arg-type]


def test_a_tenant_and_an_adapter_come_apart() -> None:
    one, other = uuid4().hex, uuid4().hex
    adapters = adapters_of({one: adapter()})
    assert adapters.apart("red") == ("red", None)
    assert adapters.apart(other) == (other, None), "nobody knows it"
    tenant, fingerprint = adapters.apart("red" + one)
    assert (tenant, len(fingerprint)) == ("red", 32)
    assert adapters.apart(one) == (None, fingerprint)
    assert adapters.apart(other + one) == (other, fingerprint)


def test_those_that_are_loaded_are_read_before_anybody_is_served() -> None:
    one, loras = uuid4().hex, {}
    loras[one] = adapter()
    adapters = adapters_of(loras)
    loras.clear()
    assert adapters.apart(one)[1] is not None


def test_the_same_weights_are_the_same_adapter() -> None:
    one, again = uuid4().hex, uuid4().hex
    adapters = adapters_of({one: adapter(), again: adapter()})
    assert adapters.apart(one) == adapters.apart(again)


class BesideAnother(Alone):
    """One of two ranks."""

    def __init__(self, there: Any) -> None:
        self._there = there

    def all_of(self, value: Any) -> list[Any]:
        return [value, self._there]


def test_what_all_ranks_have_read_counts() -> None:
    """The files may change before the second one reads them."""
    one = uuid4().hex
    loaded = {one: adapter()}
    (_, alone), (_, beside), (_, beside_another) = (
        adapters_of(loaded, ranks).apart(one)
        for ranks in (Alone(), BesideAnother(b"a" * 32), BesideAnother(b"b" * 32))
    )
    assert len({alone, beside, beside_another}) == 3


@pytest.mark.parametrize(
    "other", [adapter(scaling=2.5), adapter(value=1.5), adapter(name="o_proj.lora_A.weight")]
)
def test_all_that_counts_is_in_the_fingerprint(other: Any) -> None:
    one, two = uuid4().hex, uuid4().hex
    adapters = adapters_of({one: adapter(), two: other})
    assert adapters.apart(one) != adapters.apart(two)


def test_embeddings_count() -> None:
    one, two, other = uuid4().hex, uuid4().hex, adapter()
    other.added_tokens_embeddings = {"input_embeddings": torch.ones(2, 8)}
    adapters = adapters_of({one: adapter(), two: other})
    assert adapters.apart(one) != adapters.apart(two)


def test_an_unloaded_adapter_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its KV may be evicted later. But not all that ever were."""
    monkeypatch.setattr("sglang_hcache.sglang_plugin.compat.v0_5_17.adapters._MOST_REMEMBERED", 2)
    ids = [uuid4().hex for _ in range(3)]
    loras = {lora_id: adapter(value=index) for index, lora_id in enumerate(ids)}
    adapters = adapters_of(loras)
    _, first = adapters.apart(ids[0])
    del loras[ids[0]]
    assert adapters.apart(ids[0]) == (None, first)
    adapters.apart(ids[1])
    adapters.apart(ids[2])
    assert adapters.apart(ids[0]) == (ids[0], None)
    assert adapters.apart(ids[1])[1] is not None


@pytest.mark.parametrize(("here", "there"), [(True, True), (True, False), (False, True), (False, False)])
def test_what_one_rank_cannot_load_is_unloaded_on_the_other(here: bool, there: bool) -> None:
    from sglang.srt.managers.io_struct import LoRAUpdateOutput

    from sglang_hcache.sglang_plugin.compat.v0_5_17.adapters import load_everywhere

    unloaded: list[object] = []

    def unload(asked: object) -> LoRAUpdateOutput:
        unloaded.append(asked)
        return LoRAUpdateOutput(success=True, loaded_adapters={})

    scheduler = SimpleNamespace(
        tree_cache=SimpleNamespace(bridge=SimpleNamespace(ranks=BesideAnother((there, "no file there")))),
        tp_worker=SimpleNamespace(unload_lora_adapter=unload),
    )
    of_rank = LoRAUpdateOutput(success=here, error_message="no file here", loaded_adapters={"one": "/one"})
    request = object()
    result = load_everywhere(lambda *_: of_rank, scheduler, request)
    if here and not there:
        assert unloaded == [request]
        assert (result.success, result.loaded_adapters) == (False, {})
        assert result.error_message == "not all ranks could load it, so none keeps it (rank 1: no file there)"
    else:
        assert not unloaded
        assert result is of_rank
        assert (result.success, result.error_message) == (here, "no file here")
