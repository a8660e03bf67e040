"""Requests of one id at a time.

SGLang forgets the id of a client that went away at once, and runs its request for a pass or more. And its tokenizer
processes, where there are several, do not know of each other's.
"""

from __future__ import annotations


class RequestIds:
    """Which ids name one request alone, of those that hold slots. Everything runs on the scheduler's thread."""

    def __init__(self) -> None:
        self._requests: dict[str, set[int]] = {}

    def enters(self, rid: str, request: int) -> bool:
        """A request is about to be computed, the first time or again; False while another one has its id.

        Args:
            request: tells it from others of the same id.
        """
        requests = self._requests.setdefault(rid, set())
        requests.add(request)
        return len(requests) == 1

    def leaves(self, rid: str, request: int) -> None:
        """It is over, retracted or aborted."""
        requests = self._requests.get(rid, set())
        requests.discard(request)
        if not requests:
            self._requests.pop(rid, None)
