"""Writes small random models of every supported family; nothing is downloaded."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.core_model_loading import revert_weight_conversion

from sglang_hcache.cli.paths import given_path
from sglang_hcache.cli.tiny_model.model import FAMILIES, Family, TinyModel
from sglang_hcache.core.errors import ConfigError

_EOS = "<|end|>"
_SPECIAL_TOKENS = (_EOS, "<|system|>", "<|user|>", "<|assistant|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TRAINING_TEXT = """\
When a long conversation returns to the server, the cache of its keys and values has often been evicted. The
server could compute the whole prompt again, layer by layer, and the reader would wait for every token of
it. It could also read the keys and values from a disk, which are large, so the disk becomes the narrow
place. There is a third way. Each layer of the model receives a hidden state for every token, and one matrix
turns this state into the key and the value. A hidden state is half as large as both of them together, and
the product with one matrix is much cheaper than the whole layer with its attention and its feed forward
network. So the hidden states are kept in memory and on disk, and while one layer is projected the next
layer is read. Reading and computing end at the same time when the plan is good, and neither the disk nor
the processor waits for the other. A good cache is never slower than no cache, it never gives a wrong
answer, and it never takes more space than it was given. What was stored must be checked before it is used:
a file can be cut short, a disk can be full, and a program can be stopped at any moment. Then the work is
done again from the tokens, and the answer is the same. People ask several questions about one document:
what does the author say, who was the first to see it, when did it happen, why does it matter, and how would
you explain it to a child? The document stays the same while the questions change, so its prefix is shared,
and only the last words are new. Many users share a system prompt in the same way, and every agent that
calls a tool comes back a little later with all that was said before. Numbers such as 0, 1, 2, 3, 10, 64,
100, 256, 512, 1024 and 4096 appear in text, and so do names, dates and lists.
"""


def write_tiny_model(
    path: Path | str, model: TinyModel, texts: Iterable[str] | None = None, *, device: str = "cpu"
) -> None:
    """Write ``model`` and its tokenizer into ``path``, a new or empty folder; whole or not at all.

    Args:
        texts: what the tokenizer learns its words from, so that such texts have real numbers of tokens. None:
            a built-in one.
        device: that draws the weights, others than a CPU does: a wide model's take a CPU long.

    Raises:
        ConfigError: ``path`` holds something already or cannot be written.
    """
    path = given_path("DIR", path)
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"{path} exists already; name a new or an empty folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as scratch:
            folder = Path(scratch) / "model"
            folder.mkdir()
            tokenizer = _train_tokenizer(model, [_TRAINING_TEXT] if texts is None else texts)
            _save_tokenizer(tokenizer, folder)
            _save(_random_model(model, tokenizer, device), folder)
            os.replace(folder, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
    except SafetensorError as error:  # a full disk, too
        raise ConfigError(f"cannot write {path}: {error}") from None


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # tokenizers has no class for a file that it cannot write
        raise OSError(str(error)) from error


def _save(network: Any, folder: Path) -> None:
    """What ``save_pretrained`` writes, without its progress bar."""
    network.config.architectures = [type(network).__name__]
    network.config.dtype = network.dtype
    network.config.save_pretrained(folder)
    network.generation_config.save_pretrained(folder)
    # Under the names that published checkpoints have: one tensor an expert, no second name for a tied embedding.
    state = revert_weight_conversion(network, network.cpu().state_dict())
    tied = set(network.all_tied_weights_keys)
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items() if name not in tied},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def _train_tokenizer(model: TinyModel, texts: Iterable[str]) -> Any:
    """Byte-level BPE over ``texts``: any text has tokens, and no token is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=model.vocab,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_EOS,
        pad_token=_EOS,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=model.max_position,
    )


def _words(tokenizer: Any) -> list[int]:
    """Tokens that are a whole word with the space before it: text made of them has one tokenisation."""
    return sorted(
        token
        for text, token in tokenizer.get_vocab().items()
        if text[0] == "Ġ" and text[1:].isascii() and text[1:].isalpha()
        if tokenizer.encode(" " + text[1:]) == [token]
    )


def _random_model(model: TinyModel, tokenizer: Any, device: str) -> Any:
    """The model with random weights, also where transformers would put zeros or ones.

    Only whole words can win the output layer, so an answer sent back as text (a conversation's next
    turn) has the very tokens that were generated, and prefixes of conversations are shared. Not where the
    embedding is the output layer: all other tokens would be alike.
    """
    family = FAMILIES[model.family]
    config = getattr(transformers, f"{family.prefix}Config")(
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        max_position_embeddings=model.max_position,
        initializer_range=model.initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **_sizes(model, family),
        **{"tie_word_embeddings": False, **family.more},
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device(device):
        torch.manual_seed(model.seed)
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in network.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
            elif "norm" in name or ".ln_" in name:
                parameter.uniform_(0.5, 1.5)
        if not config.tie_word_embeddings:
            words = _words(tokenizer)
            output = network.get_output_embeddings().weight
            kept = torch.zeros_like(output)
            kept[words] = output[words]
            output.copy_(kept)
    return network.to(getattr(torch, model.dtype))


def _sizes(model: TinyModel, family: Family) -> dict[str, int]:
    """Sizes that not all configurations have."""
    sizes = {family.ffn: 2 * model.hidden}
    if family.prefix == "OPT":
        sizes["word_embed_proj_dim"] = model.hidden
    if "num_experts_per_tok" in family.more:
        sizes["moe_intermediate_size"] = model.hidden
        sizes["shared_expert_intermediate_size"] = 0  # SGLang 0.5.17 runs shared experts on GPUs only
    if family.prefix not in ("OPT", "GPT2"):
        sizes |= {"num_key_value_heads": model.num_kv_heads, "head_dim": model.hidden // model.heads}
    return sizes
