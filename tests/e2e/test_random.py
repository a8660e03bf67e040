"""Servers with random settings and much too little room, random requests and disturbances: every answer is right.

``--random-servers N`` says how many; ``--fault-seed`` what is drawn. Without it the commit picks one of a few that
were tried: no commit fails by what it did not change. Threads race, so a seed gives the same settings and requests, and
not the same order of events. What a server says is scored afterwards: the model, asked under a tenant that shares
nothing, must find the same logprobs, and no better token.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_hcache.core.paths import rank_dir
from tests.e2e.harness import TOLERANCE, TierServer, parts_of
from tests.e2e.load import DiskUsage
from tests.e2e.one_server.conftest import with_overlap

PHI = {"family": "phi"}
MODELS = ({}, {"family": "qwen3", "kv_heads": 2}, {"family": "mistral", "kv_heads": 1}, PHI)
LAYERS, HIDDEN_SIZE = 3, 128
CHUNK_BYTES = 64 * LAYERS * HIDDEN_SIZE * 4
"""With hidden states. K and V take twice as much, or less."""
ROUNDS, CLIENTS, REQUESTS = 3, 4, 6
LENGTHS = (1, 2, 16, 63, 64, 65, 127, 128, 129, 200, 256)
NOT_STORED = {"custom_params": {"hcache_store": False}}


@dataclass(frozen=True)
class Settings:
    """Of one server."""

    model: dict[str, Any]
    pool: int
    overlap: bool
    flags: list[str]
    disk_bytes: int
    ranks: int

    @classmethod
    def draw(cls, dice: random.Random) -> Settings:
        """Few with two ranks: here each of them takes a core from the other."""
        drawn = cls._draw_one(dice)
        if dice.random() < 0.8 or drawn.model == PHI:  # which SGLang 0.5.17 serves with one only
            return drawn
        host_bytes = 2 * int(drawn.flags[drawn.flags.index("--hcache-host-size") + 1])
        disk_bytes = 2 * drawn.disk_bytes
        flags = [
            *drawn.flags,
            *("--tp-size", "2", "--hcache-method", "kv"),
            *("--hcache-host-size", str(host_bytes), "--hcache-disk-size", str(disk_bytes)),
        ]
        return replace(drawn, flags=flags, disk_bytes=disk_bytes, ranks=2)

    @classmethod
    def _draw_one(cls, dice: random.Random) -> Settings:
        page, pool = dice.choice((1, 1, 4, 16, 64)), dice.choice((512, 640, 896))
        method, host_chunks = dice.choice(("hidden", "hidden", "kv")), dice.choice((36, 48, 100))
        disk_bytes = dice.choice((7_000_000, 12_000_000, 40_000_000))
        chunked = dice.choice((-1, 64, 192, 512, *([48] if page < 64 else []), *([37] if page == 1 else [])))
        flags = [
            *("--dtype", "float32", "--max-total-tokens", str(pool), "--mem-fraction-static", "0.5"),
            *("--page-size", str(page), "--chunked-prefill-size", str(chunked)),
            *("--schedule-policy", dice.choice(("fcfs", "lpm", "lof", "random", "dfs-weight"))),
            *("--schedule-conservativeness", dice.choice(("0.05", "0.3", "1"))),
            *("--radix-eviction-policy", dice.choice(("lru", "lfu", "slru", "priority"))),
            *("--hcache-host-size", str(host_chunks * CHUNK_BYTES * (1 + (method == "kv")))),
            *("--hcache-disk-size", str(disk_bytes), "--hcache-disk-free-floor", "10MB"),
            *("--hcache-write-policy", dice.choice(("write_back", "write_through"))),
            *("--hcache-method", method),
        ]
        if chunked > 0 and dice.random() < 0.5:
            flags.append("--enable-mixed-chunk")
        flags += ["--max-running-requests", dice.choice(("1", "2", "8"))]
        return cls(dice.choice(MODELS), pool, dice.random() < 0.5, flags, disk_bytes, ranks=1)


@dataclass(frozen=True)
class Said:
    """An answer, perhaps cut short. Without ``logprobs`` where SGLang has lost one of them."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float] | None


class Users:
    """Clients that share beginnings, go on from answers, change their minds and go away."""

    def __init__(self, server: TierServer, longest: int) -> None:
        self._server = server
        self._longest = longest
        self.histories: list[list[int]] = []
        self._names = itertools.count()
        self.said: list[Said] = []
        self.may_lose_the_server = False

    def ask_at_once(self, dice: random.Random) -> ExitStack:
        """Let clients ask; they are done where the stack is closed."""
        threads = ThreadPoolExecutor(CLIENTS)
        clients = [threads.submit(self._client, random.Random(dice.random())) for _ in range(CLIENTS)]
        stack = ExitStack()
        stack.callback(threads.shutdown)
        stack.callback(lambda: [client.result(120) for client in clients])
        return stack

    def _client(self, dice: random.Random) -> None:
        for _ in range(REQUESTS):
            try:
                self._ask(dice)
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                if not self.may_lose_the_server:
                    raise
                return

    def _prompt(self, dice: random.Random) -> list[int]:
        tokens: list[int] = []
        histories = self.histories[-20:]
        if histories and dice.random() < 0.85:
            tokens = list(max(dice.sample(histories, min(2, len(histories))), key=len))
            ends = (len(tokens), dice.randint(1, len(tokens)), dice.randint(0, len(tokens) // 64) * 64)
            tokens = tokens[: dice.choice(ends)]
        more = dice.choice((0, 1, 20, 64, 150)) if tokens else dice.choice(LENGTHS)
        return [*tokens, *dice.choices(range(10, 290), k=more or not tokens)][: self._longest]

    def _ask(self, dice: random.Random) -> None:
        prompt, rid = self._prompt(dice), f"r{next(self._names)}-"
        sampling = {
            "max_new_tokens": dice.choice((1, 2, 8, 20, 64, 120)),
            "temperature": 0,
            "ignore_eos": True,
        }
        body = {"input_ids": prompt, "rid": rid, "sampling_params": sampling, "return_logprob": True}
        way = dice.random()
        if way < 0.1:
            threading.Timer(dice.random() ** 2 / 2, self._abort, (rid,)).start()
        if way > 0.7:
            answer = self._stream({**body, "stream": True}, leave_after=dice.choice((1, 4, 1000)))
        else:
            response = self._server.post("/generate", body)
            assert response.status_code == 200 or "abort" in response.text, response.text
            answer = response.json() if response.status_code == 200 else {}
        if "output_token_logprobs" not in answer.get("meta_info", {}):
            return  # aborted before it was computed
        tokens, scored = answer["output_ids"], answer["meta_info"]["output_token_logprobs"]
        # A stream that is aborted after it was retracted ends with its last token alone.
        if len(scored) > len(tokens):
            tokens = [token for _, token, _ in scored]
        logprobs = [logprob for logprob, _, _ in scored]
        self.said.append(Said(prompt, tokens, logprobs if len(logprobs) == len(tokens) else None))
        self.histories.append([*prompt, *tokens])

    def _abort(self, rid: str) -> None:
        with suppress(httpx.HTTPError):  # the server may have been killed
            self._server.post("/abort_request", {"rid": rid})

    def _stream(self, body: dict[str, Any], leave_after: int) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        url = self._server.process.url + "/generate"
        with httpx.stream("POST", url, json=body, timeout=120, trust_env=False) as response:
            for part in itertools.islice(parts_of(response), leave_after):
                answer = part
        return answer


def disturb(server: TierServer, dice: random.Random, folders: Sequence[Path]) -> None:
    """One thing that happens while clients ask."""
    what = dice.choice(("clear", "pause", "late", "fail", "damage", "stop"))
    if what == "clear":
        server.post("/clear_hicache_storage_backend")
    elif what == "pause":
        server.post("/pause_generation", {"mode": dice.choice(("in_place", "retract"))})
        server.post("/flush_cache")
        server.post("/continue_generation", {"torch_empty_cache": False})
    elif what == "damage":
        damage(dice, folders)
    elif what == "stop":
        server.post("/abort_request", {"abort_all": True})
    else:
        with server.switched_on("fail_read" if what == "fail" else "linger_restore"):
            threading.Event().wait(dice.random() / 2)


def damage(dice: random.Random, folders: Sequence[Path]) -> None:
    """A few bytes of a file with chunks or of a state."""
    files = [path for folder in folders for path in (*folder.glob("*.seg"), *folder.glob("state.json"))]
    if files:
        with suppress(FileNotFoundError), dice.choice(files).open("r+b") as stream:
            for _ in range(4):
                stream.seek(dice.randrange(1 + os.fstat(stream.fileno()).st_size))
                stream.write(dice.randbytes(500))


def check(server: TierServer, said: Sequence[Said]) -> None:
    """What the model says of the same tokens, computed from scratch."""
    for number, item in enumerate(said):
        scored = {"return_logprob": True, "logprob_start_len": len(item.prompt) - 1, "top_logprobs_num": 1}
        sampling = {"max_new_tokens": 1, "temperature": 0, **NOT_STORED}
        body = {"input_ids": [*item.prompt, *item.tokens], "sampling_params": sampling, **scored}
        meta = server.post("/generate", {**body, "extra_key": f"check-{random.random()}"}).json()["meta_info"]
        assert meta["cached_tokens"] == 0
        first = len(meta["input_token_logprobs"]) - len(item.tokens)
        for place, (found, best) in enumerate(
            zip(meta["input_token_logprobs"][first:], meta["input_top_logprobs"][first:], strict=True)
        ):
            said_here = found[0] if item.logprobs is None else item.logprobs[place]
            where = f"answer {number} to {len(item.prompt)} tokens, token {place} of {len(item.tokens)}"
            assert abs(found[0] - said_here) <= TOLERANCE, where
            assert best[0][0] - found[0] <= TOLERANCE, where


def restart(server: TierServer, users: Users, dice: random.Random, folders: Sequence[Path]) -> None:
    """Killed while clients ask, or stopped; what is on disk is damaged before the next start."""
    if dice.random() < 0.5:
        users.may_lose_the_server = True
        with users.ask_at_once(dice):
            threading.Event().wait(dice.random())
            server.process.kill()
        users.may_lose_the_server = False
    else:
        server.process.stop()
    damage(dice, folders)
    server.process.start()


def check_that_wrong_keys_are_seen(server: TierServer, histories: Sequence[list[int]]) -> None:
    longest = sorted(histories, key=len)[-4:]
    for history in longest:  # the tiers may have been cleared
        server.ask(history, tokens=1)
    server.to_tiers()
    with server.switched_on("corrupt_restored_key"):
        answers = [(history, server.ask(history)) for history in longest]
    wrong = [
        Said(prompt, list(answer.tokens), list(answer.logprobs))
        for prompt, answer in answers
        if answer.restored
    ]
    # Not each: a random model may attend to hardly anything of one of them.
    assert any(is_seen_to_be_wrong(server, said) for said in wrong)
    server.flush_device()


def is_seen_to_be_wrong(server: TierServer, said: Said) -> bool:
    try:
        check(server, [said])
    except AssertionError:
        return True
    return False


@pytest.fixture
def dice(pytestconfig: pytest.Config, number: int) -> random.Random:
    seed = pytestconfig.getoption("--fault-seed")
    if seed is None:
        seed = seed_of_commit(pytestconfig.rootpath)
    print(
        f"again: pytest tests/e2e/test_random.py --fault-seed {seed} --random-servers {number + 1} -k '[{number}]'"
    )
    return random.Random(f"{seed} {number}")


_TRIED_SEEDS = 7
"""From 0 on: between them pages of 1 to 64, prompts cut and whole, both methods, both write policies."""


def seed_of_commit(folder: Path) -> int:
    """0 where there is no git."""
    command = ("git", "rev-parse", "HEAD")
    try:
        said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(said[:8], 16) % _TRIED_SEEDS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("number", range(metafunc.config.getoption("--random-servers")))


def test_random_servers(dice: random.Random, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    settings = Settings.draw(dice)
    print(settings)
    model = tiny_model(layers=LAYERS, hidden=HIDDEN_SIZE, **settings.model)
    folders = [tmp_path / "one", tmp_path / "two"]
    arguments = ["--model-path", str(model), *settings.flags, "--hcache-dirs", ",".join(map(str, folders))]
    folders = [rank_dir(path, rank, settings.ranks) for path in folders for rank in range(settings.ranks)]
    with ExitStack() as stack:
        if settings.overlap:
            stack.enter_context(with_overlap())
        usage = stack.enter_context(DiskUsage(folders))
        server = stack.enter_context(TierServer(tmp_path, arguments))
        users = Users(server, settings.pool * 6 // 10)
        for number in range(ROUNDS):
            with users.ask_at_once(dice):
                for _ in range(3):
                    threading.Event().wait(dice.random() / 2)
                    disturb(server, dice, folders)
            check(server, users.said)
            users.said.clear()
            server.assert_nothing_left()
            if number == 0:
                restart(server, users, dice, folders)
        assert server.counter("restore.done") > 0, "since the restart, in all rounds"
        check_that_wrong_keys_are_seen(server, users.histories)
        assert usage.largest <= settings.disk_bytes
