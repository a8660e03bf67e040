"""Stands for an SGLang server where a page must be shown what no small random model says."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ScriptedServer:
    """Answers every chat with :attr:`answer`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answer = ""
        self.asked: list[str] = []
        """The questions, in order."""


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    """A running one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/server_info":
                self._send({"internal_states": [{}], "served_model_name": "scripted"})
            else:
                self.send_error(404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            script.asked.append(body["messages"][-1]["content"])
            chunk = {
                "choices": [{"delta": {"content": script.answer}, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1},
            }
            self._send_bytes(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode(), "text/event-stream")

        def _send(self, answer: dict[str, Any]) -> None:
            self._send_bytes(json.dumps(answer).encode(), "application/json")

        def _send_bytes(self, content: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        script = ScriptedServer(f"http://127.0.0.1:{server.server_address[1]}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield script
        server.shutdown()
