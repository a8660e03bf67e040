"""``hcache demo``: conversations that outgrow the KV pool, with the tier and without it, side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from sglang_hcache.cli.demo.parts import MODEL, TIER, demo_folder, tier_arguments
from sglang_hcache.cli.demo.report import DemoReport, TurnResult
from sglang_hcache.cli.demo.view import TextView
from sglang_hcache.cli.logbooks import Script, write_scripts
from sglang_hcache.cli.server.client import Message, ServerClient
from sglang_hcache.cli.server.cpu_runtime import has_gpu
from sglang_hcache.cli.server.pair import ServerPair, kill_all, launch_together
from sglang_hcache.cli.server.process import ServerProcess, servers_scratch
from sglang_hcache.cli.signals import terminated_as_interrupted
from sglang_hcache.cli.terminal import progress
from sglang_hcache.cli.tiny_model.write import write_tiny_model
from sglang_hcache.core.config import host_size_for
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.layout import CHUNK_TOKENS

_TOKEN_BYTES = MODEL.layers * MODEL.hidden * 4  # of hidden states; K and V take twice as much
_FEWEST_CONVERSATIONS = 3
"""With fewer, a returning conversation would still find a part of itself in the KV pool."""
_FEWEST_TURNS = 2
_MOST = 100
"""Conversations, and turns of each: a slip of the finger is told at once."""
ANSWER_TOKENS = 12
_MESSAGE_TOKENS = 2  # the chat template's own, with room
_POOL_PER_PROMPT = 1.6  # the pool holds the longest conversation, but not two of them
_HOST_SHARE = 0.4  # of all hidden states: the rest must go to disk
_FEWEST_CHUNKS = 17  # that a host tier must have room for
_STARTUP_TIMEOUT_S = 400.0  # two at once, on two cores that may have other work


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """What the user chose.

    Raises:
        ConfigError: a number out of range.
    """

    conversations: int = 4
    turns: int = 4
    keep: Path | None = None
    """Folder for model, disk tier and logs; None: a temporary one, removed at the end."""

    def __post_init__(self) -> None:
        if self.conversations < _FEWEST_CONVERSATIONS:
            raise ConfigError(
                f"--conversations: {self.conversations} is not allowed; at least {_FEWEST_CONVERSATIONS}, "
                "for fewer would stay in the KV pool"
            )
        if self.turns < _FEWEST_TURNS:
            raise ConfigError(
                f"--turns: {self.turns} is not allowed; at least {_FEWEST_TURNS}, for nobody returns with fewer"
            )
        for flag, number in (("--conversations", self.conversations), ("--turns", self.turns)):
            if number > _MOST:
                raise ConfigError(f"{flag}: {number} is not allowed; at most {_MOST}")


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes that make the pool and the host tier too small."""

    pool_tokens: int
    staging_bytes: int
    host_bytes: int
    disk_bytes: int

    @classmethod
    def of(cls, prompts: Sequence[int]) -> _Sizes:
        """For conversations that end with prompts of so many tokens.

        Raises:
            ConfigError: too long for the model.
        """
        longest = max(prompts) + ANSWER_TOKENS
        if longest > MODEL.max_position:
            raise ConfigError(
                f"--turns: the longest conversation has about {longest} tokens, "
                f"the demo's model takes {MODEL.max_position}; give fewer turns"
            )
        states = sum(prompts) * _TOKEN_BYTES
        # What layers store is measured when the server starts: there must be room for K and V of all of them.
        staging = 2 * (longest + CHUNK_TOKENS) * _TOKEN_BYTES
        chunks = max(int(_HOST_SHARE * states), _FEWEST_CHUNKS * 2 * CHUNK_TOKENS * _TOKEN_BYTES)
        pool = int(longest * _POOL_PER_PROMPT)
        return cls(pool, staging, host_size_for(staging, chunks), max(8 * states, 2**29))


def run_demo(settings: DemoSettings, view: TextView) -> DemoReport:
    """Run it; leaves no process behind, and no file outside of what ``settings`` name.

    Raises:
        ConfigError: a setting is wrong, or this machine cannot run a server.
        ServerProcessError: a server did not start.
        ChatError: a server failed.
    """
    if has_gpu():
        raise ConfigError(
            "hcache demo compares answers computed in float32, which SGLang does not serve on a GPU: it is for "
            "machines without one. Here try hcache demo --chat, or serve a model"
        )
    began = time.monotonic()
    with (
        terminated_as_interrupted() as interruptions,
        demo_folder(settings.keep) as folder,
        servers_scratch() as scratch,
    ):
        model = folder / "model"
        if not (model / "config.json").exists():
            with progress(view.console) as status:
                status("Writing a random model")
                write_tiny_model(model, MODEL)
        scripts = write_scripts(settings.conversations, settings.turns)
        sizes = _Sizes.of(_prompt_lengths(scripts, model))
        tier, reference = _servers(folder, model, sizes, scratch)
        try:
            with progress(view.console) as status:
                status("Starting two servers, with and without the tier")
                launch_together(
                    [tier, reference], lambda waited: status(f"Starting two servers: {waited:.0f} s")
                )
                status("Talking")
                with ServerClient(tier.url) as tier_client, ServerClient(reference.url) as reference_client:
                    turns = _talk(scripts, ServerPair(tier_client, reference_client), view)
                    tier_client.wait_saved()
                    state = tier_client.tier_state() or {}
            disk = state.get("disk") or {}
            report = DemoReport(
                turns=tuple(turns),
                pool_tokens=sizes.pool_tokens,
                disk_bytes=int(disk.get("bytes", 0)),
                disk_chunks=int(disk.get("chunks", 0)),
                tier_folder=folder / TIER,
                kept=settings.keep is not None,
                wall_s=time.monotonic() - began,
            )
            view.finish(report)
            if report.kept:
                tier.stop()  # gracefully: what is still in host memory goes to disk
        finally:
            interruptions.ignore()
            kill_all((tier, reference))
    return report


def _talk(scripts: Sequence[Script], pair: ServerPair, view: TextView) -> list[TurnResult]:
    """All conversations turn by turn: each comes back when all the others have been served."""
    pair.ask([Message(role="user", content="Good morning.")], max_tokens=4)  # first-use costs of both servers
    histories: list[list[Message]] = [[] for _ in scripts]
    results = []
    for turn in range(len(scripts[0])):
        for number, (script, history) in enumerate(zip(scripts, histories, strict=True)):
            history.append(Message(role="user", content=script[turn]))
            answer = pair.ask(history, max_tokens=ANSWER_TOKENS)
            history.append(Message(role="assistant", content=answer.reference.text))
            results.append(TurnResult(number + 1, turn + 1, answer))
            view.turn(results[-1])
    return results


def _servers(folder: Path, model: Path, sizes: _Sizes, scratch: str) -> tuple[ServerProcess, ServerProcess]:
    tier = tier_arguments(
        folder / "hcache-demo.yaml",
        disk_size=sizes.disk_bytes,
        host_size=sizes.host_bytes,
        staging_size=sizes.staging_bytes,
    )
    common = [
        *("--model-path", str(model), "--dtype", "float32"),
        *("--max-total-tokens", str(sizes.pool_tokens)),
        "--sleep-on-idle",  # the server that is not asked leaves the cores to the other one
    ]
    environment = {"TMPDIR": scratch}
    return (
        ServerProcess(
            [*common, *tier],
            log=folder / "server-with-tier.log",
            extra_env=environment,
            startup_timeout_s=_STARTUP_TIMEOUT_S,
        ),
        ServerProcess(
            [*common, "--hierarchical-cache", "off", "--hcache-cpu-fixes"],
            log=folder / "server-without-tier.log",
            extra_env=environment,
            startup_timeout_s=_STARTUP_TIMEOUT_S,
        ),
    )


def _prompt_lengths(scripts: Sequence[Script], model: Path) -> list[int]:
    """Tokens of each conversation's last prompt, answers included."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [
        sum(len(tokenizer.encode(message).ids) + ANSWER_TOKENS + 2 * _MESSAGE_TOKENS for message in script)
        for script in scripts
    ]
