"""Workloads of the benchmarks: generated ones have the paper's lengths, files are read or refused with their line."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_hcache.core.errors import ConfigError

Import = Callable[[str], Any]
VOCABULARY = np.arange(10, 500)


@pytest.fixture(scope="module")
def documents(bench: Import) -> Any:
    return bench("workloads.documents")


@pytest.fixture(scope="module")
def conversations(bench: Import) -> Any:
    return bench("workloads.conversations")


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


# -- documents -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "scale"), [(180, 1.0), (16, 1.0), (16, 0.25)])
def test_generated_documents_have_the_means_of_table_1(documents: Any, count: int, scale: float) -> None:
    """However few they are."""
    limits = {"context_limit": 10**6, "answer_limit": 10**6}
    made = documents.generate(count, VOCABULARY, scale=scale, seed=1, **limits)
    assert len(made) == count
    for number, task in enumerate(documents.TABLE_1):
        of_task = made[number::3]
        assert {document.task for document in of_task} == {task.name}
        assert all(document.whole_tokens == len(document.tokens) for document in of_task)
        assert len({document.whole_tokens for document in of_task}) == len(of_task)
        questions = [question for document in of_task for question in document.questions]
        for lengths, mean in (
            ([len(document.tokens) for document in of_task], task.context),
            ([len(question.tokens) for question in questions], task.question),
            ([question.answer_tokens for question in questions], task.answer),
        ):
            assert np.mean(lengths) == pytest.approx(mean * scale, rel=0.01, abs=0.3)


def test_generated_documents_repeat_and_keep_their_limits(documents: Any) -> None:
    limits = {"context_limit": 300, "answer_limit": 5, "scale": 1.0}
    one, again, other = (documents.generate(6, VOCABULARY, seed=seed, **limits) for seed in (1, 1, 2))
    assert one == again != other
    assert {len(document.tokens) for document in one} == {300}
    assert all(document.whole_tokens > 300 for document in one)
    assert all(1 <= question.answer_tokens <= 5 for document in one for question in document.questions)
    assert {token for document in one for token in document.tokens} <= set(VOCABULARY.tolist())
    assert len({document.tokens[:64] for document in one}) == 6
    first = one[0]
    assert first.longest == max(300 + len(item.tokens) + item.answer_tokens for item in first.questions)


def test_leval_files_are_read(documents: Any, tmp_path: Path) -> None:
    write_lines(
        tmp_path / "one.jsonl",
        {"input": "abc", "instructions": ["p", "q"], "outputs": ["1", "22"]},
        "",
        {"input": "abc", "instructions": ["r"], "outputs": ["333"]},
        {"input": "x\u2028y", "instructions": ["s"], "outputs": [""]},
    )
    write_lines(tmp_path / "two.jsonl", {"input": "def", "instructions": ["t"], "outputs": ["4"]})
    found = documents.load_leval(tmp_path)
    assert [(item.task, item.text, item.questions) for item in found] == [
        ("one", "abc", ("p", "q", "r")),
        ("one", "x\u2028y", ("s",)),
        ("two", "def", ("t",)),
    ]
    assert documents.load_leval(tmp_path / "two.jsonl") == found[2:]
    first = documents.tokenise(found, encode, context_limit=2, answer_limit=2)[0]
    assert (first.tokens, first.whole_tokens) == ((97, 98), 3)
    assert first.questions[0].tokens == tuple(encode("\n\np\n"))
    assert [item.answer_tokens for item in first.questions] == [1, 2, 2]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"input": "abc"', "not JSON"),
        ("[1]", "not a JSON object"),
        ({"instructions": ["q"], "outputs": ["a"]}, '"input" must be a text'),
        ({"input": "a", "instructions": "q", "outputs": ["a"]}, '"instructions" must be a list of texts'),
        ({"input": "a", "instructions": ["q"], "outputs": [1]}, '"outputs" must be a list of texts'),
        ({"input": "a", "instructions": ["q"], "outputs": []}, '1 "instructions" and 0 "outputs"'),
    ],
)
def test_a_wrong_line_of_leval_is_named(documents: Any, tmp_path: Path, line: Any, complaint: str) -> None:
    good = {"input": "abc", "instructions": ["q"], "outputs": ["a"]}
    path = write_lines(tmp_path / "task.jsonl", good, line)
    with pytest.raises(ConfigError, match=r"task\.jsonl, line 2: ") as error:
        documents.load_leval(tmp_path)
    assert complaint in str(error.value)
    assert str(path) in str(error.value)


def test_a_dataset_with_nothing_in_it_is_refused(documents: Any, tmp_path: Path) -> None:
    for path, complaint in ((tmp_path / "none", "does not exist"), (tmp_path, r"no \.jsonl files")):
        with pytest.raises(ConfigError, match=f"--dataset: .*{complaint}"):
            documents.load_leval(path)
    with pytest.raises(ConfigError, match="no documents"):
        documents.load_leval(write_lines(tmp_path / "empty.jsonl", ""))


def test_documents_are_chosen_evenly(documents: Any) -> None:
    texts = [
        documents.TextDocument(task, f"{task}{number}", ("q",), ("a",))
        for task, count in (("big", 20), ("small", 2), ("other", 20))
        for number in range(count)
    ]
    chosen = documents.choose(texts, 10, seed=3)
    assert Counter(item.task for item in chosen) == {"big": 4, "other": 4, "small": 2}
    assert chosen == documents.choose(texts, 10, seed=3)
    assert len(documents.choose(texts, 100, seed=3)) == len(texts)


def test_requests_follow_the_skew(bench: Import, documents: Any) -> None:
    made = documents.generate(8, VOCABULARY, scale=1.0, context_limit=64, answer_limit=2, seed=0)
    make = bench("workloads.documents").make_requests

    def shares(alpha: float) -> list[float]:
        found = Counter(request.prompt[:64] for request in make(made, 800, alpha=alpha, seed=4))
        return sorted((count / 800 for count in found.values()), reverse=True)

    weights = np.arange(1, 9.0) ** -2
    assert shares(0.0) == pytest.approx([1 / 8] * 8, abs=0.05)
    assert shares(2.0) == pytest.approx(sorted(weights / weights.sum(), reverse=True), abs=0.05)
    assert make(made, 20, alpha=1.0, seed=4) == make(made, 20, alpha=1.0, seed=4)
    assert len({request.prompt[64:] for request in make(made, 200, alpha=2.0, seed=4)}) > 8


# -- conversations -------------------------------------------------------------------------------------


def test_generated_conversations_have_the_means_of_figure_3(conversations: Any) -> None:
    made = conversations.generate(600, 5.0, VOCABULARY, scale=1.0, seed=1)
    assert np.mean([len(conversation) for conversation in made]) == pytest.approx(5.0, rel=0.08)
    assert min(map(len, made)) == 2
    few = conversations.generate(5, 4.0, VOCABULARY, scale=1.0, seed=1)
    assert few == conversations.generate(5, 4.0, VOCABULARY, scale=1.0, seed=1)
    for sample in (made, few):
        rounds = [item for conversation in sample for item in conversation]
        assert np.mean([len(item.tokens) for item in rounds]) == pytest.approx(66.8, rel=0.01)
        assert np.mean([item.answer_tokens for item in rounds]) == pytest.approx(358.8, rel=0.01)
    assert {len(item) for item in conversations.generate(9, 2.0, VOCABULARY, scale=1.0, seed=1)} == {2}


def test_conversations_arrive_one_request_a_unit_of_time(conversations: Any) -> None:
    rounds = conversations.generate(1500, 3.0, VOCABULARY, scale=0.05, seed=2)
    placed = conversations.schedule("x", rounds, most_tokens=10**6, think_time_s=2.0, seed=2)
    starts = [conversation.start for conversation in placed.conversations]
    assert starts[0] == 0.0
    assert starts == sorted(starts)
    last = placed.conversations[-1]
    assert placed.least_s(0.5) >= 2 * last.start + sum(last.pauses_s)
    gaps = np.diff(starts)
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.1)  # exponential
    pauses = [pause for conversation in placed.conversations for pause in conversation.pauses_s]
    assert np.mean(pauses) == pytest.approx(2.0, rel=0.1)
    assert all(len(item.pauses_s) == len(item.rounds) - 1 for item in placed.conversations)


@pytest.mark.parametrize("count", [1, 2, 5, 1500])
def test_the_rate_is_met_however_few_conversations_there_are(conversations: Any, count: int) -> None:
    rounds = conversations.generate(count, 3.0, VOCABULARY, scale=0.05, seed=0)
    for seed in range(20):
        placed = conversations.schedule("x", rounds, most_tokens=10**6, think_time_s=2.0, seed=seed)
        starts = [conversation.start for conversation in placed.conversations]
        assert starts[0] == 0.0
        assert len(set(starts)) == count, "two at once"
        assert starts[-1] == pytest.approx(len(placed.rounds) * (count - 1) / count)


def test_conversations_end_where_they_get_too_long(conversations: Any) -> None:
    short, long = (
        conversations.Round((1,) * 10, 10),
        conversations.Round((1,) * 100, 10),
    )
    placed = conversations.schedule(
        "x", [(short, short, long, short), (long,)], most_tokens=50, think_time_s=1.0, seed=0
    )
    assert [item.rounds for item in placed.conversations] == [(short, short)]
    assert placed.left_out == 1
    with pytest.raises(ConfigError, match="--max-tokens"):
        conversations.schedule("x", [(long,)], most_tokens=50, think_time_s=1.0, seed=0)


def said(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"conversations": [{"from": speaker, "value": text} for speaker, text in messages]}


@pytest.mark.parametrize("before", ["", "\ufeff", " " * 100, "\ufeff\n\n"])
@pytest.mark.parametrize("as_array", [True, False])
def test_marks_and_blanks_before_the_first_record(
    conversations: Any, tmp_path: Path, as_array: bool, before: str
) -> None:
    record = json.dumps(said(("user", "x"), ("assistant", "y")))
    path = tmp_path / "talk.json"
    path.write_text(before + (f"[{record}]" if as_array else record))
    assert conversations.detect_format(path) == "sharegpt"
    assert conversations.load_sharegpt(path) == [[("x", "y")]]


@pytest.mark.parametrize("as_array", [True, False])
def test_half_a_character_is_replaced(conversations: Any, tmp_path: Path, as_array: bool) -> None:
    """Texts that were cut amid an emoji."""
    record = json.dumps(said(("user", "hi \ud83d there \U0001f600"), ("assistant", "\ude00")))
    (path := tmp_path / "talk.json").write_text(f"[{record}]" if as_array else record)
    assert conversations.load_sharegpt(path) == [[("hi \ufffd there \U0001f600", "\ufffd")]]


@pytest.mark.parametrize("as_array", [True, False])
def test_sharegpt_files_are_read(conversations: Any, tmp_path: Path, as_array: bool) -> None:
    records = [
        said(("system", "be kind"), ("human", "ab"), ("gpt", "cdef"), ("human", "g"), ("gpt", "hi")),
        said(("gpt", "alone"), ("human", "unanswered")),
        said(("user", "x"), ("assistant", "y")),
    ]
    path = tmp_path / "talk.json"
    write_lines(path, *([records] if as_array else records))
    assert conversations.detect_format(path) == "sharegpt"
    found = conversations.load_sharegpt(path)
    assert found == [[("ab", "cdef"), ("g", "hi")], [("x", "y")]]
    rounds = conversations.tokenise(found, encode, 0.5)
    assert [(len(item.tokens), item.answer_tokens) for item in rounds[0]] == [(2, 2), (1, 1)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            '[{"conversations": []},\n {"conversations": "no"}]',
            'conversation 2: "conversations" must be a list',
        ),
        ('[{"conversations": [{"from": "human"}]}]', "conversation 1: a message must have"),
        ('[{"conversations": []},\n oops]', "line 2: not JSON"),
        ('{"conversations": []}\n{"conversations": 3}\n', 'line 2: "conversations" must be a list'),
        ('{"conversations": []}\n{"conv', "line 2: not JSON"),
        ("[]", "no conversations"),
    ],
)
def test_what_is_wrong_with_a_sharegpt_file_is_named(
    conversations: Any, tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "talk.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        conversations.load_sharegpt(path)
    assert str(error.value).startswith(f"--dataset: {path}")
    assert complaint in str(error.value)


def test_a_file_of_neither_format_is_refused(conversations: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ShareGPT"):
        conversations.detect_format(write_lines(tmp_path / "x.jsonl", {"input": "abc"}))
    with pytest.raises(ConfigError, match="is not a file"):
        conversations.detect_format(tmp_path)


# -- the Mooncake trace ----------------------------------------------------------------------------------


def traced(timestamp: float, length: int, *ids: int, output: int = 40) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": ids}


def placed_trace(conversations: Any, path: Path, **changes: Any) -> Any:
    limits = {"scale": 1 / 16, "most_tokens": 200, "seed": 5, **changes}
    return conversations.place_trace(conversations.load_mooncake(path), 10, VOCABULARY, **limits)


def test_equal_ids_of_the_trace_are_equal_prefixes(conversations: Any, tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "trace.jsonl",
        traced(0, 1100, 0, 1, 2),
        traced(3000, 1536, 0, 1, 3),
        traced(3000, 600, 4, 1),
        traced(90_000, 51_200, *range(100)),
        traced(9000, 1536, 0, 1, 2, output=0),
    )
    assert conversations.detect_format(path) == "mooncake"
    workload = placed_trace(conversations, path)
    prompts = [item.rounds[0].tokens for item in workload.conversations]
    one, two, three, four = prompts
    assert [len(prompt) for prompt in prompts] == [69, 96, 38, 96]  # lengths / 16
    assert one[:64] == two[:64]
    assert one[64:69] == four[64:69] != two[64:69]
    assert three[:32] != one[:32]
    assert three[32:38] == one[32:38]  # the tokens of block 1, after another block
    assert [item.rounds[0].answer_tokens for item in workload.conversations] == [2, 2, 2, 1]
    assert [item.start for item in workload.conversations] == [0, 1, 1, 3]  # 4 requests in 9 s
    assert workload.left_out == 1
    assert placed_trace(conversations, path) == workload
    assert placed_trace(conversations, path, seed=6) != workload
    with pytest.raises(ConfigError, match="--max-tokens"):
        placed_trace(conversations, path, most_tokens=10)


def test_requests_of_one_moment_have_no_rate(conversations: Any, tmp_path: Path) -> None:
    """One alone needs none."""
    too_long = traced(9000, 51_200, *range(100))
    path = write_lines(tmp_path / "trace.jsonl", traced(3000, 600, 4, 1), too_long)
    assert [item.start for item in placed_trace(conversations, path).conversations] == [0.0]
    write_lines(path, traced(3000, 600, 4, 1), traced(3000, 600, 5, 1), too_long)
    with pytest.raises(ConfigError, match=r"--conversations: the 2 requests .* one timestamp, 3000;"):
        placed_trace(conversations, path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"timestamp": ', "not JSON"),
        ("7", "not a JSON object"),
        ({"timestamp": 0, "input_length": 5, "hash_ids": [1]}, '"output_length" must be a number'),
        ({**traced(0, 5, 1), "timestamp": "soon"}, '"timestamp" must be a number'),
        ({**traced(0, 5, 1), "timestamp": math.nan}, '"timestamp" must be a number'),
        ({**traced(0, 5, 1), "timestamp": 10**400}, '"timestamp" must be a number'),
        ({**traced(0, 5, 1), "input_length": math.inf}, '"input_length" must be a number'),
        ({**traced(0, 5, 1), "output_length": math.inf}, '"output_length" must be a number'),
        ({**traced(0, 5, 1), "hash_ids": ["a"]}, '"hash_ids" must be a list of numbers'),
        (traced(0, 513, 1), "513 tokens of input and 1 blocks"),
        (traced(0, 0), "0 tokens of input"),
    ],
)
def test_a_wrong_line_of_the_trace_is_named(
    conversations: Any, tmp_path: Path, line: Any, complaint: str
) -> None:
    path = write_lines(tmp_path / "trace.jsonl", traced(0, 5, 1), line)
    with pytest.raises(ConfigError, match=r"trace\.jsonl, line 2: ") as error:
        placed_trace(conversations, path)
    assert complaint in str(error.value)
