"""Small random models of every supported family, for tests and demos; nothing is downloaded."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.core_model_loading import revert_weight_conversion

from sglang_hcache.cli.paths import given_path
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.units import format_bytes


@dataclass(frozen=True, slots=True)
class Family:
    """A family's classes in transformers, and what its configuration says besides the sizes that all have."""

    prefix: str
    """Of its classes."""
    more: Mapping[str, Any] = field(default_factory=dict)
    ffn: str = "intermediate_size"
    """What the width of the feed forward network is called."""
    shares_kv_heads: bool = True
    """Whether SGLang serves it with fewer KV heads than heads."""


_EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}

FAMILIES: Mapping[str, Family] = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral", {"sliding_window": None}),
    "qwen1.5": Family("Qwen2", shares_kv_heads=False),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3"),
    "opt": Family("OPT", ffn="ffn_dim", shares_kv_heads=False),
    "gemma": Family("Gemma", {"tie_word_embeddings": True}),
    # SGLang reads hidden_act, which published configurations have and transformers does not write.
    "gemma2": Family("Gemma2", {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}),
    "phi": Family("Phi", {"partial_rotary_factor": 0.5}, shares_kv_heads=False),
    "phi3": Family("Phi3", {"partial_rotary_factor": 0.75}),
    "olmo": Family("Olmo", {"clip_qkv": 4.0}, shares_kv_heads=False),
    "olmo2": Family("Olmo2"),
    "stablelm": Family("StableLm", {"partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    "mixtral": Family("Mixtral", {"num_local_experts": 4, **_EXPERTS}),
    "qwen2_moe": Family("Qwen2Moe", {"num_experts": 4, "decoder_sparse_step": 1, **_EXPERTS}),
    "gpt2": Family("GPT2", {"tie_word_embeddings": True}, ffn="n_inner", shares_kv_heads=False),
}
"""Name -> family."""
_LEARNED_POSITIONS = ("opt", "gpt2")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EOS = "<|end|>"
_SPECIAL_TOKENS = (EOS, "<|system|>", "<|user|>", "<|assistant|>")
_SEEDS = range(-(2**63), 2**64)  # that torch takes
_SMALLEST_VOCAB = 320
"""Bytes, special tokens and enough merges that some tokens are whole words."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """What to write. Two equal ones give the same files, on one kind of device.

    Raises:
        ConfigError: sizes that do not fit together, or an unknown family or dtype.
    """

    family: str = "llama"
    layers: int = 4
    hidden: int = 256
    heads: int = 4
    kv_heads: int | None = None
    """As many as ``heads`` if None: multi-head attention."""
    vocab: int = 512
    dtype: str = "float32"
    max_position: int = 8192
    seed: int = 0
    initializer_range: float = 0.15
    """Much above the usual 0.02, with which logits are almost uniform and wrong keys go unnoticed."""

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(f"--family: {self.family!r} is not allowed; allowed: {', '.join(FAMILIES)}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype: {self.dtype!r} is not allowed; allowed: {', '.join(DTYPES)}")
        if self.hidden % (2 * self.heads):
            raise ConfigError(f"--hidden: {self.hidden} is not a multiple of 2 * --heads = {2 * self.heads}")
        if not FAMILIES[self.family].shares_kv_heads and self.num_kv_heads != self.heads:
            raise ConfigError(
                f"--kv-heads: {self.kv_heads} is not allowed: {self.family} has as many as --heads"
            )
        if self.num_kv_heads < 1 or self.heads % self.num_kv_heads:
            raise ConfigError(f"--kv-heads: {self.kv_heads} does not divide --heads {self.heads}")
        if self.vocab < _SMALLEST_VOCAB:
            raise ConfigError(f"--vocab: {self.vocab} is not allowed; at least {_SMALLEST_VOCAB}")
        if self.seed not in _SEEDS:
            raise ConfigError(f"--seed: {self.seed} is not allowed; from -2^63 to 2^64 - 1")

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def fewest_bytes(self) -> int:
        """That its weights take while they are made, in float32: the large matrices of every family."""
        # A layer has Q, output and at least two matrices of the feed forward network, which are twice as wide.
        embeddings = self.vocab + (self.max_position if self.family in _LEARNED_POSITIONS else 0)
        return 4 * self.hidden * (self.layers * 6 * self.hidden + embeddings)


def write_tiny_model(
    path: Path | str, model: TinyModel, texts: Iterable[str] | None = None, *, device: str = "cpu"
) -> None:
    """Write ``model`` and its tokenizer into ``path``, a new or empty folder; whole or not at all.

    Args:
        texts: what the tokenizer learns its words from, so that such texts have real numbers of tokens. None:
            a built-in one.
        device: that draws the weights, others than a CPU does: a wide model's take a CPU long.

    Raises:
        ConfigError: ``path`` holds something already or cannot be written, or memory is too small for ``model``.
    """
    path = given_path("DIR", path)
    _check_name(path)
    _check_memory(model)
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


def _check_name(path: Path) -> None:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{str(path)!r} is not allowed: the tokenizer can write UTF-8 names only") from None


def _check_memory(model: TinyModel) -> None:
    """Before torch fails with an error of its own, or the system kills the process."""
    available = psutil.virtual_memory().available
    if model.fewest_bytes > available:
        raise ConfigError(
            "--layers, --hidden, --vocab, --max-position: the weights would take more than the "
            f"{format_bytes(available)} of memory that are available"
        )


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
        eos_token=EOS,
        pad_token=EOS,
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
    return network.to(DTYPES[model.dtype])


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
