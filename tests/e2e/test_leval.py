"""Real documents and questions: L-Eval through the chat API in a Zipf order, with and without the tier."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from sglang_hcache.cli.server.client import Message, ServerClient
from sglang_hcache.cli.server.pair import (
    LOGPROB_TOLERANCE,
    ServerPair,
    Summary,
    launch_together,
)
from sglang_hcache.cli.server.process import ServerProcess
from sglang_hcache.cli.tiny_model.model import TinyModel
from sglang_hcache.cli.tiny_model.write import write_tiny_model
from sglang_hcache.testing.zipf import zipf_order

REPOSITORY = Path(__file__).parents[2]
TASKS = ("quality", "paper_assistant")
DOCUMENTS_PER_TASK = 3  # the shortest ones: 28 thousand tokens together
REQUESTS = 24
ZIPF_ALPHA = 1.0
SEED = 7
ANSWER_TOKENS = 8

MODEL = TinyModel(layers=4, hidden=128, heads=2, vocab=8192, max_position=8192)
POOL_TOKENS = 7168  # about one and a half documents
TIER_CONFIG = """\
disk_size: 2GB
disk_free_floor: 256MiB
segment_size: 16MiB
host_size: 40MiB  # two thirds of the documents' 58 MB, with staging
staging_size: 12MiB
"""


@dataclass(frozen=True)
class Document:
    task: str
    text: str
    questions: tuple[str, ...]
    tokens: int

    def ask(self, dice: random.Random) -> list[Message]:
        """The document first: its questions share it as a prefix."""
        return [Message(role="user", content=f"{self.text}\n\n{dice.choice(self.questions)}")]


@dataclass(frozen=True)
class Servers:
    tier: ServerProcess
    tier_client: ServerClient
    reference_client: ServerClient
    switches: Path


@pytest.fixture(scope="module")
def leval() -> Path:
    for folder in (REPOSITORY, *REPOSITORY.parents):
        traces = folder / "shared" / "traces" / "leval"
        if traces.is_dir():
            return traces
    pytest.skip("no folder shared/traces/leval beside the repository: L-Eval's documents are not here")


@pytest.fixture(scope="module")
def model(leval: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose tokenizer knows the documents' words: real text has real numbers of tokens."""
    folder = tmp_path_factory.mktemp("leval-model")
    write_tiny_model(folder, MODEL, [str(row["input"]) for task in TASKS for row in _rows(leval, task)])
    return folder


@pytest.fixture(scope="module")
def documents(leval: Path, model: Path) -> list[Document]:
    """The shortest documents of each task, whole."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    chosen: list[Document] = []
    for task in TASKS:
        by_text = {
            row["input"]: Document(
                task, row["input"], tuple(row["instructions"]), len(tokenizer.encode(row["input"]).ids)
            )
            for row in _rows(leval, task)
        }  # a text that comes twice counts once
        chosen += sorted(by_text.values(), key=lambda document: document.tokens)[:DOCUMENTS_PER_TASK]
    return chosen


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("leval")
    switches = folder / "switches"
    switches.mkdir()
    (switches / "always_restore").touch()
    config = folder / "hcache.yaml"
    config.write_text(TIER_CONFIG)
    common = [
        *("--model-path", str(model), "--dtype", "float32", "--max-total-tokens", str(POOL_TOKENS)),
        *("--chunked-prefill-size", "4096", "--sleep-on-idle"),
    ]
    tier = ServerProcess(
        [*common, "--hcache-config", str(config), "--hcache-dirs", str(folder / "store")],
        log=folder / "tier.log",
        extra_env={
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
            "HCACHE_TEST_SWITCHES": str(switches),
        },
        startup_timeout_s=400,
    )
    reference = ServerProcess(
        [*common, "--hierarchical-cache", "off", "--hcache-cpu-fixes"],
        log=folder / "reference.log",
        startup_timeout_s=400,
    )
    try:
        launch_together([tier, reference])
        with ServerClient(tier.url) as tier_client, ServerClient(reference.url) as reference_client:
            yield Servers(tier, tier_client, reference_client, switches)
    finally:
        reference.kill()
        tier.stop()


def test_every_answer_equals_the_recomputed_one(servers: Servers, documents: list[Document]) -> None:
    dice = random.Random(SEED)
    order = zipf_order(len(documents), REQUESTS, alpha=ZIPF_ALPHA, seed=SEED)
    pair = ServerPair(servers.tier_client, servers.reference_client)
    answers = [pair.ask(documents[item].ask(dice), max_tokens=ANSWER_TOKENS) for item in order]
    summary = Summary.of(answers)
    assert summary.requests == REQUESTS
    assert summary.unequal == 0, f"largest difference of logprobs: {summary.largest_difference}"
    assert summary.largest_difference <= LOGPROB_TOLERANCE
    assert summary.host_requests > 0
    assert summary.disk_requests > 0
    assert "Traceback" not in servers.tier.log_text()


def test_a_wrong_key_is_noticed(servers: Servers, documents: list[Document]) -> None:
    """The comparison above can fail: with damaged keys it does."""
    pair = ServerPair(servers.tier_client, servers.reference_client)
    shortest, *others = sorted(documents, key=lambda document: document.tokens)
    for document in (shortest, *others[:3]):  # the others push it out of the pool
        servers.tier_client.ask(document.ask(random.Random(SEED)), max_tokens=1)
    servers.tier_client.wait_saved()
    switch = servers.switches / "corrupt_restored_key"
    switch.touch()
    try:
        answer = pair.ask(shortest.ask(random.Random(SEED)), max_tokens=ANSWER_TOKENS)
    finally:
        switch.unlink()
    assert answer.tier.sources.restored > 0
    assert not answer.is_equal


def _rows(leval: Path, task: str) -> list[dict[str, object]]:
    with (leval / f"{task}.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
