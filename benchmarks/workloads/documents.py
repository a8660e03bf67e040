"""Documents with several questions each: L-Eval's files, or generated ones of the same lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang_hcache.core.errors import ConfigError
from sglang_hcache.testing.zipf import zipf_order
from workloads.json_files import json_lines, whole_characters
from workloads.lengths import draw_lengths, draw_tokens

QUESTIONS = 8
"""Of a generated document."""


@dataclass(frozen=True, slots=True)
class Task:
    """Mean lengths in tokens of one task."""

    name: str
    context: float
    question: float
    answer: float


TABLE_1 = (
    Task("paper_assistant", 10603.5, 142.7, 404.8),
    Task("gsm100", 5451.7, 77.4, 4.3),
    Task("quality", 7053.9, 92.4, 19.2),
)
"""The tasks of L-Eval in Table 1 of the HCache paper."""
_CONTEXT_SPREAD = 0.25
_QUESTION_SPREAD = 0.5


@dataclass(frozen=True, slots=True)
class TextDocument:
    """As it stands in a file."""

    task: str
    text: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    """One for each question."""


@dataclass(frozen=True, slots=True)
class Question:
    tokens: tuple[int, ...]
    answer_tokens: int
    """Tokens of its answer."""


@dataclass(frozen=True, slots=True)
class Document:
    """In tokens. A prompt is the document and one question after it."""

    task: str
    tokens: tuple[int, ...]
    questions: tuple[Question, ...]
    whole_tokens: int
    """Before it was cut."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return len(self.tokens) + max(len(item.tokens) + item.answer_tokens for item in self.questions)


def load_leval(path: Path) -> list[TextDocument]:
    """Documents of a JSONL file, or of all ``.jsonl`` files of a folder, in order.

    Lines with the same document, as in ``gsm100``, become one with all their questions.

    Raises:
        ConfigError: names file and line of what is wrong.
    """
    if not path.exists():
        raise ConfigError(f"--dataset: {path} does not exist")
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"--dataset: {path} has no .jsonl files")
    documents = [document for file in files for document in _merged(file)]
    if not documents:
        raise ConfigError(f"--dataset: {path} has no documents")
    return documents


def _merged(file: Path) -> list[TextDocument]:
    merged: dict[str, TextDocument] = {}
    for line in _lines(file):
        known = merged.get(line.text)
        if known is not None:
            line = TextDocument(
                line.task, line.text, known.questions + line.questions, known.answers + line.answers
            )
        merged[line.text] = line
    return list(merged.values())


def _lines(file: Path) -> Iterator[TextDocument]:
    for number, row in json_lines(file):
        try:
            yield _document(file.stem, row)
        except ValueError as error:
            raise ConfigError(f"--dataset: {file}, line {number}: {error}") from None


def _document(task: str, row: object) -> TextDocument:
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    text = row.get("input")
    if not isinstance(text, str) or not text:
        raise ValueError('"input" must be a text')
    questions, answers = (_texts(name, row.get(name)) for name in ("instructions", "outputs"))
    if len(questions) != len(answers) or not questions:
        raise ValueError(f'{len(questions)} "instructions" and {len(answers)} "outputs"')
    return TextDocument(task, whole_characters(text), questions, answers)


def _texts(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f'"{name}" must be a list of texts')
    return tuple(map(whole_characters, value))


def choose(documents: Sequence[TextDocument], count: int, *, seed: int) -> list[TextDocument]:
    """``count`` documents, as evenly from all tasks as they have them; all if there are fewer."""
    dice = np.random.default_rng(seed)
    by_task: dict[str, list[TextDocument]] = {}
    for index in dice.permutation(len(documents)):
        by_task.setdefault(documents[index].task, []).append(documents[index])
    chosen: list[TextDocument] = []
    tasks = [by_task[task] for task in sorted(by_task)]
    while len(chosen) < count and any(tasks):
        chosen += [task.pop() for task in tasks if task][: count - len(chosen)]
    return chosen


def tokenise(
    documents: Sequence[TextDocument],
    encode: Callable[[str], list[int]],
    *,
    context_limit: int,
    answer_limit: int,
) -> list[Document]:
    """In tokens; what is longer than a limit is cut."""
    made = []
    for document in documents:
        tokens = encode(document.text)
        questions = tuple(
            Question(tuple(encode(f"\n\n{question}\n")), _limited(len(encode(answer)), answer_limit))
            for question, answer in zip(document.questions, document.answers, strict=True)
        )
        made.append(Document(document.task, tuple(tokens[:context_limit]), questions, len(tokens)))
    return made


def generate(
    count: int, vocabulary: np.ndarray, *, scale: float, context_limit: int, answer_limit: int, seed: int
) -> list[Document]:
    """``count`` documents, tasks in turn, whose lengths have the means of ``TABLE_1`` times ``scale``; then cut."""
    dice = np.random.default_rng(seed)
    documents: dict[int, Document] = {}
    for number, task in enumerate(TABLE_1):
        places = range(number, count, len(TABLE_1))
        contexts = draw_lengths(dice, task.context * scale, _CONTEXT_SPREAD, len(places))
        shape = (len(places), QUESTIONS)
        questions, answers = (
            draw_lengths(dice, mean * scale, _QUESTION_SPREAD, len(places) * QUESTIONS)
            .reshape(shape)
            .tolist()
            for mean in (task.question, task.answer)
        )
        for place, context, asked, made in zip(places, contexts.tolist(), questions, answers, strict=True):
            documents[place] = Document(
                task.name,
                draw_tokens(dice, vocabulary, min(context, context_limit)),
                tuple(
                    Question(draw_tokens(dice, vocabulary, length), _limited(answer, answer_limit))
                    for length, answer in zip(asked, made, strict=True)
                ),
                context,
            )
    return [documents[place] for place in range(count)]


def describe(documents: Sequence[Document], source: str) -> dict[str, Any]:
    """What is asked about, for the header: means of what is sent, and how much of the documents was cut away."""
    questions = [question for document in documents for question in document.questions]
    return {
        "source": source,
        "documents": len(documents),
        "tasks": sorted({document.task for document in documents}),
        "mean_context_tokens": float(np.mean([len(document.tokens) for document in documents])),
        "mean_question_tokens": float(np.mean([len(question.tokens) for question in questions])),
        "mean_answer_tokens": float(np.mean([question.answer_tokens for question in questions])),
        "longest_prompt_tokens": max(document.longest for document in documents),
        "cut_documents": sum(len(document.tokens) < document.whole_tokens for document in documents),
        "mean_whole_tokens": float(np.mean([document.whole_tokens for document in documents])),
    }


def _limited(answer_tokens: int, limit: int) -> int:
    return max(1, min(answer_tokens, limit))


@dataclass(frozen=True, slots=True)
class Request:
    prompt: tuple[int, ...]
    answer_tokens: int


def make_requests(documents: Sequence[Document], count: int, *, alpha: float, seed: int) -> list[Request]:
    """``count`` requests: documents in a Zipf order, each time one of its questions."""
    dice = np.random.default_rng((seed, 1))
    order = zipf_order(len(documents), count, alpha=alpha, seed=seed)
    return [ask_about(documents[item], int(dice.integers(len(documents[item].questions)))) for item in order]


def ask_about(document: Document, number: int) -> Request:
    """The document and one of its questions."""
    question = document.questions[number]
    return Request(document.tokens + question.tokens, question.answer_tokens)
