"""Tiny models: every family loads, the same seed gives the same bytes, answers survive the way through text."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_hcache.core.errors import ConfigError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from sglang_hcache.cli.tiny_model import write  # noqa: E402
from sglang_hcache.cli.tiny_model.model import FAMILIES, TinyModel  # noqa: E402
from sglang_hcache.cli.tiny_model.write import write_tiny_model  # noqa: E402

SMALL = {"layers": 2, "hidden": 64, "heads": 4}


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def load(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_loads_and_generates(tmp_path, family):
    kv_heads = 2 if FAMILIES[family].shares_kv_heads else 4
    write_tiny_model(tmp_path / "m", TinyModel(family=family, kv_heads=kv_heads, **SMALL))
    network = load(tmp_path / "m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m", local_files_only=True)
    assert type(network).__name__.startswith(FAMILIES[family].prefix)
    assert network.dtype == torch.float32
    assert getattr(network.config, "num_key_value_heads", 4) == kv_heads
    assert not getattr(network.config, "sliding_window", None) or family == "gemma2"
    prompt = tokenizer("the state of every token", return_tensors="pt").input_ids
    answer = network.generate(prompt, max_new_tokens=8, do_sample=False)
    assert answer.shape[1] == prompt.shape[1] + 8


def test_weights_that_transformers_leaves_constant_are_random(tmp_path):
    expected = {
        "qwen2": ["q_proj.bias", "k_proj.bias"],
        "qwen3": ["q_norm.weight"],
        "olmo2": ["k_norm.weight"],
        "stablelm": ["v_proj.bias"],
    }
    for family, names in expected.items():
        write_tiny_model(tmp_path / family, TinyModel(family=family, **SMALL))
        weights = load(tmp_path / family).state_dict()
        for name in [f"model.layers.1.self_attn.{name}" for name in names]:
            assert weights[name].std() > 0.05, name


def test_same_seed_same_files(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_tiny_model(tmp_path / name, TinyModel(seed=seed, **SMALL))
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert digests(tmp_path / "a")["model.safetensors"] != digests(tmp_path / "c")["model.safetensors"]


def test_the_tokenizer_learns_the_words_it_is_given(tmp_path):
    text = "quokka wombat " * 40
    lengths = []
    for name, texts in (("built-in", None), ("given", [text])):
        write_tiny_model(tmp_path / name, TinyModel(**SMALL), texts)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / name, local_files_only=True)
        assert tokenizer.decode(tokenizer(text).input_ids) == text
        lengths.append(len(tokenizer(text).input_ids))
    assert lengths[1] <= 2 * 40 + 2 < lengths[0]


def test_writing_leaves_the_random_state_alone(tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    write_tiny_model(tmp_path / "m", TinyModel(**SMALL))
    assert torch.rand(1) == expected


def test_bfloat16(tmp_path):
    write_tiny_model(tmp_path / "m", TinyModel(dtype="bfloat16", **SMALL))
    assert load(tmp_path / "m").config.dtype == torch.bfloat16


@pytest.mark.parametrize("vocab", [320, 512, 4096])
def test_answers_keep_their_tokens_as_text(tmp_path, vocab):
    """A conversation's next turn sends the answer back as text: its tokens must be those generated."""
    write_tiny_model(tmp_path / "m", TinyModel(vocab=vocab, **SMALL))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m", local_files_only=True)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Größe, 数, why?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert max(prompt) < vocab
    assert tokenizer.decode(prompt) == "<|system|>Be brief.<|user|>Größe, 数, why?<|assistant|>"

    generated = load(tmp_path / "m").generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False)
    answer = generated[0, len(prompt) :].tolist()
    assert len(answer) == 32
    text = tokenizer.decode(answer, skip_special_tokens=True)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And now?"}]
    following = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert following[: len(prompt) + 32] == prompt + answer


def test_another_device_draws_all_weights(tmp_path):
    """Nothing is drawn on the CPU then: a wide model's weights would take it long."""
    model = TinyModel(dtype="float16", **SMALL)
    tokenizer = write._train_tokenizer(model, [write._TRAINING_TEXT])
    network = write._random_model(model, tokenizer, "meta")
    assert {parameter.device.type for parameter in network.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float16}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"dtype": "int8"}, "--dtype: 'int8'"),
        ({"hidden": 100, "heads": 3}, "--hidden: 100"),
        ({"heads": 4, "kv_heads": 3}, "--kv-heads: 3"),
        ({"heads": 4, "kv_heads": 0}, "--kv-heads: 0"),
    ],
)
def test_wrong_setting_is_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        TinyModel(**setting)


def test_existing_content_is_kept(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        write_tiny_model(tmp_path, TinyModel(**SMALL))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Like a full disk: what writes more gets an error from the system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [10, 1 << 10, 1 << 16], ids=["template", "tokenizer", "weights"])
def test_a_full_disk_is_told_with_the_folder(tmp_path, num_bytes):
    with (
        files_of_at_most(num_bytes),
        pytest.raises(ConfigError, match=re.escape(f"cannot write {tmp_path}/m: ") + ".*too large"),
    ):
        write_tiny_model(tmp_path / "m", TinyModel(**SMALL))
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_not_utf_8_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="utf-8"):
        write_tiny_model(tmp_path / os.fsdecode(b"\xff"), TinyModel(**SMALL))
    assert list(tmp_path.iterdir()) == []
