"""SGLang's engine in a program of one's own, as docs/quickstart.md has it: a prompt, and again after it was evicted.

Usage: offline_engine.py, then the arguments of a server. Prints both answers as JSON.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from sglang import Engine
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args


def main() -> None:
    on_interrupt = signal.getsignal(signal.SIGINT)
    load_plugins()
    engine = Engine(server_args=prepare_server_args(sys.argv[1:]))
    prompt = [7 + position % 90 for position in range(300)]
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    answers = []
    for _ in range(2):
        answers.append(engine.generate(input_ids=prompt, sampling_params=sampling, return_logprob=True))
        wait_for(lambda: engine.flush_cache().success)
        wait_for(lambda: is_written(tier_of(engine)))
    disk = tier_of(engine)["disk"]
    keeps_signals = signal.getsignal(signal.SIGINT) == on_interrupt
    engine.shutdown()
    print(json.dumps({"answers": answers, "chunks_on_disk": disk["chunks"], "keeps_signals": keeps_signals}))


def is_written(tier: dict[str, Any]) -> bool:
    return not tier["saving"] and tier["host"]["dirty"] == 0


def tier_of(engine: Engine) -> dict[str, Any]:
    state: dict[str, Any] = engine.get_server_info()["internal_states"][0]["hcache"]
    return state


def wait_for(holds: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.05)


if __name__ == "__main__":
    main()
