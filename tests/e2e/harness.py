"""What the end-to-end tests share: a real server with switches, and a client for SGLang's native API."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from sglang_hcache.cli.server.answers import Lines
from sglang_hcache.cli.server.client import KEEPALIVE_S
from sglang_hcache.cli.server.process import ServerProcess

PLUGINS = Path(__file__).parent / "plugins"
TOLERANCE = 1e-3  # logprobs, float32 models


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int
    device: int
    host: int
    disk: int
    prompt_tokens: int
    retractions: int

    @property
    def restored(self) -> int:
        return self.host + self.disk


def parts_of(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """What comes of a streamed answer. Not by ``iter_lines``: see :class:`Lines`."""
    lines = Lines()
    for piece in response.iter_text():
        for line in lines.take(piece):
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


class TierServer:
    """A server under strict memory checks, with the switches of ``plugins/hcache_test_plugin.py``.

    At the end it is killed. A test of what a stop leaves behind says ``process.stop()``.

    Args:
        cache: its user's cache folder, where profiles are looked for; None: an empty one.
        packages: folders in which it looks for Python packages first.
        port: of every start; 0 for a free one each time.
        admin_key: which SGLang wants for some of its calls; all calls of this client have it.
        sleep_on_idle: a server that is not asked leaves the cores to others; SGLang's default takes one at all times.
    """

    def __init__(
        self,
        folder: Path,
        args: Sequence[str],
        cache: Path | None = None,
        *,
        packages: Sequence[Path] = (),
        port: int = 0,
        admin_key: str | None = None,
        sleep_on_idle: bool = True,
    ) -> None:
        self.switches = folder / "switches"
        self.switches.mkdir(parents=True, exist_ok=True)
        environment = {
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
            "PYTHONPATH": os.pathsep.join([*map(str, packages), os.environ["PYTHONPATH"]]),
            "HCACHE_TEST_SWITCHES": str(self.switches),
            # The stand-in for libcuda.so.1 stays where it is: this process builds it.
            "XDG_CACHE_HOME": str(cache or folder / "cache"),
        }
        args = [*args, *_always_restored(args)]
        if admin_key is not None:
            args = [*args, "--admin-api-key", admin_key]
        if sleep_on_idle:
            args = [*args, "--sleep-on-idle"]
        self.process = ServerProcess(
            args, log=folder / "server.log", extra_env=environment, startup_timeout_s=400, port=port
        )
        self._client = httpx.Client(
            headers={} if admin_key is None else {"Authorization": f"Bearer {admin_key}"},
            limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
            timeout=120,
            trust_env=False,
        )

    def __enter__(self) -> TierServer:
        self.process.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._say_how_it_is()
        self.process.kill()
        self._client.close()

    def _say_how_it_is(self) -> None:
        """For whoever reads of a test that failed."""
        with suppress(Exception):  # it may be what the test failed for
            print(f"the tier's state: {json.dumps(self.state())}")

    # -- requests --------------------------------------------------------------------------------

    def post(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        return self._client.post(self.process.url + path, json=body)

    def switch_off(self) -> httpx.Response:
        """The tier; needs the admin's key."""
        return self._client.delete(self.process.url + "/hicache/storage-backend")

    def switch_on(self, backend: str = "hcache") -> httpx.Response:
        """The tier, again."""
        url = self.process.url + "/hicache/storage-backend"
        return self._client.put(url, json={"hicache_storage_backend": backend})

    def ask(self, prompt: Sequence[int], *, tokens: int = 8, **fields: Any) -> Answer:
        """Greedy continuation of a prompt of token ids, with logprobs."""
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            **fields,
        }
        response = self.post("/generate", body)
        assert response.status_code == 200, response.text
        meta = response.json()["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        return Answer(
            tokens=tuple(item[1] for item in meta["output_token_logprobs"]),
            logprobs=tuple(item[0] for item in meta["output_token_logprobs"]),
            cached=meta["cached_tokens"],
            device=details.get("device", 0),
            host=details.get("host", 0),
            disk=details.get("storage", 0),
            prompt_tokens=meta["prompt_tokens"],
            retractions=meta["num_retractions"],
        )

    def stream(self, prompt: Sequence[int], *, tokens: int) -> Generator[dict[str, Any], None, None]:
        """What comes of the answer, bit by bit. Whoever closes it goes away, and SGLang aborts the request."""
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
        with self._client.stream("POST", self.process.url + "/generate", json=body) as response:
            yield from parts_of(response)

    def leave_after_the_first_token(self, prompt: Sequence[int]) -> None:
        answer = self.stream(prompt, tokens=3000)
        next(answer)
        answer.close()

    def recompute(self, prompt: Sequence[int], **fields: Any) -> Answer:
        """The same, computed from scratch: a tenant of its own shares no cache with anybody."""
        answer = self.ask(prompt, extra_key=f"recompute-{random.random()}", **fields)
        assert answer.cached == 0
        return answer

    def flush_device(self) -> None:
        """Drop the device tree; the tiers stay."""
        wait_for(lambda: self.post("/flush_cache").status_code == 200, "an idle server")

    def to_tiers(self) -> None:
        """Save what was computed so far and drop it from the device: it comes back from the tiers."""
        self.settle()
        self.flush_device()

    def forget_everything(self) -> None:
        """Empty device and tiers: after a test has put wrong KV there."""
        self.to_tiers()
        assert self.post("/clear_hicache_storage_backend").status_code == 200
        self.settle()

    def settle(self) -> None:
        """Wait until everything captured is sealed and everything to be demoted is written."""
        wait_for(lambda: not self.state()["saving"], "saving to end")

    def internal_state(self) -> dict[str, Any]:
        """What the scheduler says of itself."""
        response = self._client.get(self.process.url + "/server_info")
        return dict(response.json()["internal_states"][0])

    def state(self) -> dict[str, Any]:
        """The tier's numbers."""
        return dict(self.internal_state()["hcache"])

    def counter(self, name: str) -> int:
        return int(self.state()["counters"].get(name, 0))

    # -- looking in and breaking -----------------------------------------------------------------

    @contextmanager
    def switched_on(self, name: str, text: str = "") -> Iterator[None]:
        switch = self.switches / name
        part = self.switches / "part"
        part.write_text(text)
        part.rename(switch)
        try:
            yield
        finally:
            switch.unlink()

    def probe(self, name: str) -> dict[str, torch.Tensor]:
        """K and V that request ``probe-<name>`` left in the pool: (layers, tokens, heads, head_dim)."""
        path = self.switches / f"probe-{name}.pt"
        wait_for(path.exists, f"{path.name}")
        state: dict[str, torch.Tensor] = torch.load(path)
        return state

    def hooked_functions(self, package: Path) -> set[str]:
        """Names of SGLang's functions that are hooked in any process. SGLang must have come from ``package``."""
        codes = [json.loads(path.read_text()) for path in self.switches.glob("code-*.json")]
        assert {Path(code["sglang"]).parent for code in codes} == {package}
        return {name.rpartition(".")[2] for code in codes for name in code["hooks"]}

    def assert_nothing_left(self) -> None:
        """No slot, ticket or open request outlives the requests; the idle memory check has run."""

        def is_idle() -> bool:
            state = self.state()
            return (
                state["in_flight_tokens"] == 0
                and state["captured_requests"] == 0
                and not any(state["requests"].values())
            )

        wait_for(is_idle, "restores, tickets and captures to end")
        self.flush_device()
        assert self.process.is_running
        for line in self.process.log_text().splitlines():
            assert "leak" not in line.lower() or "server_args" in line, line
            assert "Traceback" not in line, self.process.log_text()[-4000:]


def _always_restored(args: Sequence[str]) -> list[str]:
    """What makes a server restore whatever there is, unless ``args`` say otherwise: what is faster depends on the
    machine.
    """
    more = [] if "--hcache-method" in args else ["--hcache-method", "hidden"]
    chosen = [*args, *more]
    method = chosen[chosen.index("--hcache-method") + 1]
    is_left_open = method in ("hidden", "kv") and "--hcache-restore" not in args
    return [*more, "--hcache-restore", "always"] if is_left_open else more


def wait_for(condition: Any, what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)


def put_back(folder: Path, path: Path) -> None:
    """``folder`` to ``path``, where a file is now, although a server may make one there at any moment."""

    def is_back() -> bool:
        try:
            folder.rename(path)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            return False
        return True

    path.unlink()
    wait_for(is_back, f"{path} to be put back")


def random_prompt(seed: int, length: int, vocabulary: int = 290) -> list[int]:
    return random.Random(seed).choices(range(10, vocabulary), k=length)


def assert_same_bytes(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tokens: int) -> None:
    """K and V of the first ``tokens`` tokens of two probes have the same bits."""
    for name in ("k", "v"):
        assert torch.equal(found[name][:, :tokens], expected[name][:, :tokens])


def largest_difference(one: Answer, other: Answer) -> float:
    """Largest difference of logprobs; infinite where the tokens differ."""
    if one.tokens != other.tokens:
        return float("inf")
    # numpy's max, for a NaN must not hide behind Python's.
    return float(np.max(np.abs(np.subtract(one.logprobs, other.logprobs))))
