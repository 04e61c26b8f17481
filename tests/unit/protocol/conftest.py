"""A vLLM server as far as its weight routes go: a real HTTP server on the loopback whose answers a test can script."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

RIGHT_ANSWERS: dict[str, Any] = {
    "POST /init_weight_transfer_engine": {"message": "Weight transfer initialized"},
    "POST /start_weight_update": {"message": "Weight update started"},
    "POST /start_draft_weight_update": {"message": "Draft weight update started"},
    "POST /update_weights": {"message": "Weights updated"},
    "POST /finish_weight_update": {"message": "Weight update finished"},
    "POST /shutdown_weight_transfer_engine": {"message": "Weight transfer shut down"},
    "POST /pause": {"status": "paused"},
    "POST /resume": {"status": "resumed"},
    "GET /is_paused": {"is_paused": False},
    "GET /weight_info": {"weight_version": "default"},
    "GET /get_world_size": {"world_size": 2},
    "POST /reset_prefix_cache": {"success": True},
    "POST /collective_rpc": {"results": [{"rank": 0}, None, "7"]},
    "GET /server_info": {"vllm_config": {"instance_id": "abc"}, "vllm_env": {}, "system_env": {}},
    "POST /reset_mm_cache": None,
    "POST /reset_encoder_cache": None,
    "POST /sleep": {"status": "sleeping", "level": 2},
    "POST /wake_up": {"status": "awake", "tags": None},
}
"""What vLLM 0.32 answers. None is an empty body."""


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, str]
    body: Any
    headers: dict[str, str]

    @property
    def route(self) -> str:
        return f"{self.method} {self.path}"


@dataclass
class Answer:
    """``body`` is bytes, or what JSON can carry, or None for empty. ``gate`` is waited at first; ``broken`` closes without a word."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    gate: threading.Event | None = None
    broken: bool = False


class FakeServer:
    """Answers as vLLM does, unless a test scripts a route: one `Answer`, or a list used up one by one."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.script: dict[str, Answer | list[Answer]] = {}
        self.arrived = threading.Semaphore(0)
        self.gates: list[threading.Event] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                parts = urlsplit(self.path)
                raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = json.loads(raw) if raw else None
                request = Request(self.command, parts.path, dict(parse_qsl(parts.query)), body, dict(self.headers))
                fake.requests.append(request)
                fake.arrived.release()
                answer = fake.answer_to(request)
                if answer.gate is not None:
                    answer.gate.wait()
                if answer.broken:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return
                payload = (
                    answer.body if isinstance(answer.body, bytes) else b"" if answer.body is None else json.dumps(answer.body).encode()
                )
                self.send_response(answer.status)
                for name, value in ({"Content-Type": "application/json"} | answer.headers).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            do_GET = do_POST = handle_any

            def log_message(self, *args: Any) -> None:
                """Says nothing on stderr."""

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that stopped waiting is no failure of a test."""

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def answer_to(self, request: Request) -> Answer:
        path = request.path.removeprefix("/prefix")
        route = f"{request.method} {path}"
        scripted = self.script.get(route)
        if isinstance(scripted, list) and scripted:
            return scripted.pop(0)
        if isinstance(scripted, Answer):
            return scripted
        if route == "POST /update_weight_version":
            return Answer({"success": True, "new_version": request.body["new_version"]})
        if route in RIGHT_ANSWERS:
            return Answer(RIGHT_ANSWERS[route])
        return Answer({"detail": "Not Found"}, 404)

    def gate(self) -> threading.Event:
        """An event that is set when the test ends, if not before."""
        self.gates.append(threading.Event())
        return self.gates[-1]

    @property
    def routes(self) -> list[str]:
        return [request.route for request in self.requests]

    def close(self) -> None:
        for gate in self.gates:
            gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def new_server() -> Iterator[Callable[[], FakeServer]]:
    servers: list[FakeServer] = []

    def make() -> FakeServer:
        servers.append(FakeServer())
        return servers[-1]

    yield make
    for each in servers:
        each.close()


@pytest.fixture
def server(new_server: Callable[[], FakeServer]) -> FakeServer:
    return new_server()


@pytest.fixture
def answer() -> type[Answer]:
    return Answer
