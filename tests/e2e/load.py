"""Requests without a pause, every answer compared with its reference, and the disk space they take meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.e2e.harness import TOLERANCE, Answer, TierServer, largest_difference

_SAMPLE_S = 0.02
_LATEST_S = 150.0
"""More than the client's own limit."""


@dataclass(frozen=True)
class Context:
    """A prompt and the right answer to it."""

    prompt: list[int]
    reference: Answer


@dataclass(frozen=True)
class _Served:
    asked_at: float
    answer: Answer


class Load:
    """Several clients that ask for contexts, the first ones most often (Zipf), until the ``with`` block ends.

    Leaving the block fails if an answer was wrong, refused or did not come.
    """

    def __init__(self, server: TierServer, contexts: Sequence[Context], *, clients: int, seed: int) -> None:
        self._server = server
        self._contexts = contexts
        self._weights = [1 / rank for rank in range(1, len(contexts) + 1)]
        self._served: list[_Served] = []
        self._failures: list[str] = []
        self._may_die = False
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(random.Random(1000 * seed + number),), daemon=True)
            for number in range(clients)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        deadline = time.monotonic() + _LATEST_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), "a request hangs"
        assert not self._failures, self._failures

    def until(self, is_enough: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
        """Go on until ``is_enough()``."""
        deadline = time.monotonic() + timeout_s
        while not is_enough():
            assert not self._failures, self._failures
            assert time.monotonic() < deadline, f"waited {timeout_s} s under load for {what}"
            time.sleep(0.05)

    def until_served(self, requests: int, *, from_disk: bool = False) -> None:
        """Go on until so many of the requests that are sent from now on have been answered."""
        now = time.monotonic()

        def is_enough() -> bool:
            fresh = [item.answer for item in list(self._served) if item.asked_at > now]
            return sum(answer.disk > 0 or not from_disk for answer in fresh) >= requests

        self.until(is_enough, f"{requests} answers" + " with tokens from disk" * from_disk)

    def until_disk_serves(self, requests: int = 2) -> None:
        """Likewise, counting only requests that were restored from disk, at least in part."""
        self.until_served(requests, from_disk=True)

    def expect_death(self) -> None:
        """The server is about to be killed: clients that lose it are done."""
        self._may_die = True

    def _work(self, dice: random.Random) -> None:
        try:
            while not self._stop.is_set():
                number = dice.choices(range(len(self._contexts)), weights=self._weights)[0]
                context = self._contexts[number]
                asked_at = time.monotonic()
                answer = self._server.ask(context.prompt)
                difference = largest_difference(answer, context.reference)
                assert difference <= TOLERANCE, f"context {number} is off by {difference}: {answer}"
                self._served.append(_Served(asked_at, answer))
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            if not self._may_die:
                self._failures.append(repr(error))
        except Exception as error:
            self._failures.append(repr(error))


class DiskUsage:
    """The most that some folders took together, as ``du`` counts, sampled every 20 ms."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.largest = 0

    def __enter__(self) -> DiskUsage:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self.largest = max(self.largest, sum(_allocated_bytes(folder) for folder in self._folders))


def _allocated_bytes(folder: Path) -> int:
    try:
        files = [folder, *folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return 0
    total = 0
    for file in files:
        try:
            total += 512 * file.stat().st_blocks
        except (FileNotFoundError, NotADirectoryError):  # evicted, or damaged by the test, meanwhile
            continue
    return total
