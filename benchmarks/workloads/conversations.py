"""Conversations for ``multiturn.py``: ShareGPT's files, the Mooncake trace, or generated ones. All in tokens."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from sglang_hcache.core.errors import ConfigError
from workloads.json_files import json_array, json_lines, whole_characters
from workloads.lengths import draw_lengths, draw_tokens

MEAN_INPUT, MEAN_OUTPUT = 66.8, 358.8
"""Tokens of a round in the HCache paper's Figure 3 (ShareGPT)."""
_SPREAD = 1.0
"""Of generated lengths: standard deviation of the logarithm. Real ones have a long tail."""
MOONCAKE_BLOCK = 512
"""Tokens of one id in ``hash_ids``."""
_BEGIN_BYTES = 2**16
_MOST = 2**53
"""Of a trace's numbers: milliseconds and tokens."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one message adds to a conversation, and the length of its answer."""

    tokens: tuple[int, ...]
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Its first round arrives at ``start``; each later one ``pauses[i]`` after the answer before it."""

    rounds: tuple[Round, ...]
    start: float
    """In units of time in which one request arrives on average, all conversations together."""
    pauses_s: tuple[float, ...] = ()

    @property
    def tokens(self) -> int:
        """Of the last prompt with its answer."""
        return sum(len(item.tokens) + item.answer_tokens for item in self.rounds)


@dataclass(frozen=True, slots=True)
class Workload:
    source: str
    conversations: tuple[Conversation, ...]
    left_out: int
    """Conversations, or requests of a trace, that were too long."""

    @property
    def rounds(self) -> list[Round]:
        """Of all conversations: one for each request."""
        return [item for conversation in self.conversations for item in conversation.rounds]

    def least_s(self, rate: float) -> float:
        """Seconds of arrivals and pauses at ``rate`` requests a second, with answers that take no time."""
        return max(item.start / rate + sum(item.pauses_s) for item in self.conversations)


TextRounds = list[tuple[str, str]]
"""Pairs of what a person said and what was answered."""


def detect_format(path: Path) -> str:
    """``sharegpt`` or ``mooncake``, by the first record of the file.

    Raises:
        ConfigError: neither.
    """
    for _, record in _records(path):
        if isinstance(record, dict):
            if "hash_ids" in record:
                return "mooncake"
            if "conversations" in record:
                return "sharegpt"
        break
    raise ConfigError(
        f'--dataset: {path}: the first record has neither "conversations" (ShareGPT) nor "hash_ids" (Mooncake)'
    )


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """Place and value of each record, of a JSON array or of JSON lines."""
    if not path.is_file():
        raise ConfigError(f"--dataset: {path} is not a file")
    with path.open("rb") as file:
        begin = file.read(_BEGIN_BYTES).removeprefix(codecs.BOM_UTF8)
    if begin.lstrip().startswith(b"["):
        yield from ((f"conversation {number}", record) for number, record in json_array(path))
    else:
        yield from ((f"line {number}", record) for number, record in json_lines(path))


# -- ShareGPT ------------------------------------------------------------------------------------------


def load_sharegpt(path: Path) -> list[TextRounds]:
    """The rounds of each conversation that has any: a message of ``human`` (or ``user``) and the answer after it.

    Raises:
        ConfigError: names file and place of what is wrong.
    """
    found = []
    for place, record in _records(path):
        try:
            rounds = _text_rounds(record)
        except ValueError as error:
            raise ConfigError(f"--dataset: {path}, {place}: {error}") from None
        if rounds:
            found.append(rounds)
    if not found:
        raise ConfigError(f"--dataset: {path} has no conversations")
    return found


def _text_rounds(record: object) -> TextRounds:
    messages = record.get("conversations") if isinstance(record, dict) else None
    if not isinstance(messages, list):
        raise ValueError('"conversations" must be a list')
    rounds: TextRounds = []
    said: str | None = None
    for message in messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(k), str) for k in ("from", "value")
        ):
            raise ValueError('a message must have the texts "from" and "value"')
        text = whole_characters(message["value"])
        if message["from"] in ("human", "user"):
            said = text
        elif said and text and message["from"] in ("gpt", "assistant", "chatgpt"):
            rounds.append((said, text))
            said = None
    return rounds


def tokenise(
    conversations: Sequence[TextRounds], encode: Callable[[str], list[int]], scale: float
) -> list[tuple[Round, ...]]:
    """In tokens; all lengths times ``scale``, messages cut at their end."""
    rounds = []
    for texts in conversations:
        pairs = [(encode(said + "\n"), len(encode(answer))) for said, answer in texts]
        rounds.append(
            tuple(Round(tuple(said[: scaled(len(said), scale)]), scaled(made, scale)) for said, made in pairs)
        )
    return rounds


# -- generated -----------------------------------------------------------------------------------------


def generate(
    count: int, mean_rounds: float, vocabulary: np.ndarray, *, scale: float, seed: int
) -> list[tuple[Round, ...]]:
    """``count`` conversations whose rounds have the lengths of Figure 3 on average, times ``scale``.

    Numbers of rounds are geometric from 2 on: somebody always returns.
    """
    dice = np.random.default_rng(seed)
    rounds = (1 + dice.geometric(1 / (mean_rounds - 1), count)).tolist()
    inputs, outputs = (
        iter(draw_lengths(dice, mean * scale, _SPREAD, sum(rounds)).tolist())
        for mean in (MEAN_INPUT, MEAN_OUTPUT)
    )
    return [
        tuple(Round(draw_tokens(dice, vocabulary, next(inputs)), next(outputs)) for _ in range(number))
        for number in rounds
    ]


def schedule(
    source: str,
    conversations: Sequence[tuple[Round, ...]],
    *,
    most_tokens: int,
    think_time_s: float,
    seed: int,
) -> Workload:
    """Poisson arrivals, stretched to one request a unit of time, and exponential pauses.

    Args:
        most_tokens: a conversation ends before the round that would make it longer.

    Raises:
        ConfigError: nothing is short enough.
    """
    fitting = [_fit(rounds, most_tokens) for rounds in conversations]
    kept = [rounds for rounds in fitting if rounds]
    if not kept:
        raise ConfigError(f"--max-tokens: no conversation has a round within {most_tokens} tokens")
    dice = np.random.default_rng((seed, 3))
    mean_rounds = sum(map(len, kept)) / len(kept)
    starts = np.cumsum(dice.exponential(1.0, len(kept)))
    starts -= starts[0]
    if len(kept) > 1:  # of a few, the mean gap would be far from it by chance
        starts *= (len(kept) - 1) * mean_rounds / starts[-1]
    placed = [
        Conversation(rounds, float(start), tuple(dice.exponential(think_time_s, len(rounds) - 1).tolist()))
        for rounds, start in zip(kept, starts, strict=True)
    ]
    return Workload(source, tuple(placed), len(fitting) - len(kept))


def _fit(rounds: Sequence[Round], most_tokens: int) -> tuple[Round, ...]:
    kept: list[Round] = []
    total = 0
    for item in rounds:
        total += len(item.tokens) + item.answer_tokens
        if total > most_tokens:
            break
        kept.append(item)
    return tuple(kept)


# -- Mooncake ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TraceRequest:
    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def load_mooncake(path: Path) -> Iterator[TraceRequest]:
    """Requests of the trace, as they stand in the file.

    Raises:
        ConfigError: names file and line of what is wrong.
    """
    for place, record in _records(path):
        try:
            yield _trace_request(record)
        except ValueError as error:
            raise ConfigError(f"--dataset: {path}, {place}: {error}") from None


def _trace_request(record: object) -> TraceRequest:
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    values = [record.get(name) for name in ("timestamp", "input_length", "output_length")]
    for name, value in zip(("timestamp", "input_length", "output_length"), values, strict=True):
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _MOST:
            raise ValueError(f'"{name}" must be a number from 0 to 2^53')
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or not all(isinstance(item, int) and item >= 0 for item in ids):
        raise ValueError('"hash_ids" must be a list of numbers')
    timestamp, given, made = values
    if given < 1 or len(ids) != -(-int(given) // MOONCAKE_BLOCK):
        raise ValueError(f"{given} tokens of input and {len(ids)} blocks of {MOONCAKE_BLOCK} tokens")
    return TraceRequest(float(timestamp), int(given), max(int(made), 1), tuple(ids))


def place_trace(
    requests: Iterator[TraceRequest],
    count: int,
    vocabulary: np.ndarray,
    *,
    scale: float,
    most_tokens: int,
    seed: int,
) -> Workload:
    """The first ``count`` requests that fit, in their order and rhythm, stretched to one request a unit of time.

    Raises:
        ConfigError: none fits, or several that do came at the same moment.
    """
    left_out = 0

    def fitting() -> Iterator[tuple[TraceRequest, Round]]:
        nonlocal left_out
        for request in requests:
            item = _trace_round(request, vocabulary, scale, most_tokens, seed)
            if item is None:
                left_out += 1
            else:
                yield request, item

    kept = list(islice(fitting(), count))
    if not kept:
        raise ConfigError(
            f"--max-tokens: no request of the trace has at most {most_tokens} tokens; try --scale"
        )
    first = kept[0][0].timestamp_ms
    span = max(request.timestamp_ms - first for request, _ in kept)
    if not span and len(kept) > 1:
        raise ConfigError(
            f"--conversations: the {len(kept)} requests of the trace that were chosen have one timestamp, {first:g}; "
            "no rate can be made of them, more are needed"
        )
    factor = (len(kept) - 1) / span if span else 0.0
    placed = tuple(Conversation((item,), (request.timestamp_ms - first) * factor) for request, item in kept)
    return Workload("Mooncake trace", placed, left_out)


def _trace_round(
    request: TraceRequest, vocabulary: np.ndarray, scale: float, most_tokens: int, seed: int
) -> Round | None:
    """The prompt's tokens, made from its blocks' ids: equal ids make an equal prefix. None if it is too long."""
    block = scaled(MOONCAKE_BLOCK, scale)
    length = min(scaled(request.input_length, scale), len(request.hash_ids) * block)
    answer_tokens = scaled(request.output_length, scale)
    if length + answer_tokens > most_tokens:
        return None
    tokens = [
        token
        for number in request.hash_ids
        for token in draw_tokens(np.random.default_rng((seed, number)), vocabulary, block)
    ]
    return Round(tuple(tokens[:length]), answer_tokens)


def scaled(length: int, scale: float) -> int:
    """``length`` times ``scale``, at least 1."""
    return max(1, round(length * scale))
