"""``hcache demo --chat``: a server with a small random model and the chat page, with one command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from sglang_hcache.cli.chat.command import host_names, require_nicegui, serve_page, usable_port
from sglang_hcache.cli.chat.session import AnswerOptions
from sglang_hcache.cli.demo.parts import MODEL, demo_folder, tier_arguments
from sglang_hcache.cli.server.cpu_runtime import has_gpu
from sglang_hcache.cli.server.process import ServerProcess, servers_scratch
from sglang_hcache.cli.signals import terminated_as_interrupted
from sglang_hcache.cli.terminal import progress
from sglang_hcache.cli.tiny_model.write import write_tiny_model
from sglang_hcache.core.config import host_size_for
from sglang_hcache.core.layout import CHUNK_TOKENS

_NOTE = (
    "This demo's model has random weights: its answers are words without meaning. What the tier does is real."
)
_POOL_TOKENS = 6144
"""A few turns of two conversations that begin with a starter: a third one pushes the first one out."""
_PASS_TOKENS = 768
_HOST_CHUNKS = 20
"""About one such conversation, where layers store K and V: what was said before goes to disk."""
_ROW_BYTES = 2 * MODEL.layers * MODEL.hidden * 4  # of a token's K and V, the most that layers store
_STAGING_BYTES = 2 * _PASS_TOKENS * _ROW_BYTES
_HOST_BYTES = host_size_for(_STAGING_BYTES, _HOST_CHUNKS * CHUNK_TOKENS * _ROW_BYTES)
_DISK_BYTES = 2**30
_ANSWER_TOKENS = 120
_STARTUP_TIMEOUT_S = 300.0


def run_chat_demo(
    *,
    keep: Path | None,
    host: str,
    port: int,
    opens_browser: bool,
    allowed: Sequence[str] = (),
) -> None:
    """Start the server and serve the page until Ctrl-C; leaves no process, and no file but what is to be kept.

    Args:
        keep: folder for model, disk tier and logs; None: a temporary one.
        port: of the page; 0 for a free one.
        allowed: further names under which browsers may ask for the page.

    Raises:
        ConfigError: a setting is wrong, NiceGUI is missing, or this machine cannot run a server.
        ServerProcessError: the server did not start, or died.
    """
    require_nicegui()
    host_names(host, allowed)
    port = usable_port(host, port)  # before anybody waits for a server
    with (
        terminated_as_interrupted() as interruptions,
        demo_folder(keep) as folder,
        servers_scratch() as scratch,
    ):
        model = folder / "model"
        server = _server(folder, model, scratch)
        try:
            with progress(Console()) as status:
                if not (model / "config.json").exists():
                    status("Writing a random model")
                    write_tiny_model(model, MODEL)
                status("Starting a server with a random model")
                server.start(lambda waited: status(f"Starting a server with a random model: {waited:.0f} s"))
            serve_page(
                server.url,
                host=host,
                port=port,
                allowed=allowed,
                # Greedy: only whole words win then, so that an answer that is sent back has the tokens it had.
                options=AnswerOptions(max_tokens=_ANSWER_TOKENS, temperature=0.0),
                opens_browser=opens_browser,
                note=_NOTE,
                is_over=lambda: not server.is_running,
            )
            server.require_running()
            if keep is not None:
                server.stop()  # gracefully: what is still in host memory goes to disk
        finally:
            interruptions.ignore()
            server.kill()


def _server(folder: Path, model: Path, scratch: str) -> ServerProcess:
    tier = tier_arguments(
        folder / "hcache-chat.yaml",
        disk_size=_DISK_BYTES,
        host_size=_HOST_BYTES,
        staging_size=_STAGING_BYTES,
    )
    # A GPU would compute so small a model sooner than it comes back, and takes no float32.
    own = ["--dtype", "float16", "--hcache-restore", "always"] if has_gpu() else ["--dtype", "float32"]
    arguments = [
        *("--model-path", str(model), *own, "--served-model-name", "random-model"),
        *("--max-total-tokens", str(_POOL_TOKENS), "--chunked-prefill-size", str(_PASS_TOKENS)),
        *tier,
        "--sleep-on-idle",
    ]
    return ServerProcess(
        arguments,
        log=folder / "server.log",
        extra_env={"TMPDIR": scratch},
        startup_timeout_s=_STARTUP_TIMEOUT_S,
    )
