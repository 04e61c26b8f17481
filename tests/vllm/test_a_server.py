"""A real vLLM server on this machine, attached by its URL: one for the whole file, ended by its process id.

Runs before the session's engines are started: it has an engine of its own, and no more than two may be alive.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import requests

import ray_weightsync as rws
from ray_weightsync.engines.vllm_args import WORKER_EXTENSION
from tests.vllm import support
from tests.vllm.support import CALL_LIMIT_S, NUM_TOKENS, PROMPTS, START_LIMIT_S, Pairs

Tokens = list[list[int]]
END_LIMIT_S = 30


class Server:
    """``python -m vllm.entrypoints.openai.api_server``, as FACTS has it. Port 0 lets the kernel choose one that nobody else can take."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._up = threading.Event()
        self._last: deque[str] = deque(maxlen=40)
        options = {
            "--host": "127.0.0.1",
            "--port": "0",
            "--model": model,
            "--dtype": "bfloat16",
            "--max-model-len": "256",
            "--weight-transfer-config": json.dumps({"backend": "rws"}),
            "--worker-extension-cls": WORKER_EXTENSION,
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--skip-tokenizer-init", "--enforce-eager"]
        command += [word for option in options.items() for word in option]
        env = {**os.environ, **support.engine_env(1), "VLLM_SERVER_DEV_MODE": "1"}
        self._process = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._last.append(line)
            if "Application startup complete" in line:
                self._up.set()
        self._up.set()

    def wait_until_up(self) -> None:
        """Until it says so, then until it listens, which follows at once."""
        assert self._up.wait(START_LIMIT_S), "".join(self._last)
        while not self._ports():
            assert self._process.poll() is None, f"it ended:\n{''.join(self._last)}"

    def _ports(self) -> list[int]:
        sockets = psutil.Process(self._process.pid).net_connections("tcp4")
        return [each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN and each.laddr.ip == "127.0.0.1"]

    @property
    def url(self) -> str:
        (port,) = self._ports()
        return f"http://127.0.0.1:{port}"

    def get(self, path: str) -> dict[str, Any]:
        answer: dict[str, Any] = requests.get(f"{self.url}/{path}", timeout=CALL_LIMIT_S).json()
        return answer

    def complete(self, prompt: list[int], num_tokens: int, *, stream: bool = False) -> requests.Response:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        }
        response = requests.post(f"{self.url}/v1/completions", json=body, timeout=CALL_LIMIT_S, stream=stream)
        assert response.status_code == 200, response.text
        return response

    def tokens(self, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        ids: list[int] = self.complete(prompt, num_tokens).json()["choices"][0]["token_ids"]
        return ids

    def all_tokens(self) -> Tokens:
        return [self.tokens(prompt) for prompt in PROMPTS]

    def stop(self) -> None:
        """End it and whatever it has started."""
        try:
            family = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            family = []
        self._process.terminate()
        alive = support.alive_after(END_LIMIT_S, family)
        for process in alive:
            process.kill()
        self._process.wait(END_LIMIT_S)
        self._reader.join(END_LIMIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture(scope="module")
def server(checkpoints: Any, fresh_b: dict[int, Tokens]) -> Iterator[Server]:
    """The server, started after the engines that `fresh_b` needs have ended."""
    server = Server(checkpoints.a)
    try:
        server.wait_until_up()
        yield server
    finally:
        server.stop()


@pytest.fixture
def sync(server: Server) -> Iterator[rws.WeightSync]:
    with rws.WeightSync.attach([server.url]) as sync:
        yield sync


@pytest.mark.parametrize("overlap", [False, True], ids=["staged", "overlap"])
def test_a_round_gives_a_fresh_engines_output_under_the_version_and_leaves_it_running(
    server: Server, pairs_a: Pairs, pairs_b: Pairs, fresh_b: dict[int, Tokens], overlap: bool
) -> None:
    with rws.WeightSync.attach([server.url], transport=rws.Host(overlap=overlap, bucket_bytes=1 << 16)) as sync:
        assert sync.status().version == server.get("weight_info")["weight_version"], "adopted as it was found"
        sync.send_weights(pairs_a, version="a")
        of_a = server.all_tokens()
        assert of_a != fresh_b[1]
        report = sync.send_weights(pairs_b, version=7)
        assert report.committed == ("r0",)
        assert report.weights_digest == rws.weights_digest(pairs_b)
        assert server.all_tokens() == fresh_b[1]
        assert server.get("weight_info")["weight_version"] == "7"
        assert server.get("is_paused") == {"is_paused": False}
        sync.send_weights(pairs_a, version="a again")
        assert server.all_tokens() == of_a


def test_a_broadcast_reaches_it_as_well(server: Server, pairs_a: Pairs, pairs_b: Pairs, fresh_b: dict[int, Tokens]) -> None:
    with rws.WeightSync.attach([server.url], transport=rws.Collective(bucket_bytes=1 << 18, interface="lo")) as sync:
        sync.send_weights(pairs_a, version="a")
        report = sync.send_weights(pairs_b, version="by broadcast")
        assert (report.transport, report.committed) == ("collective", ("r0",))
        assert server.all_tokens() == fresh_b[1]
        assert server.get("weight_info")["weight_version"] == "by broadcast"
        assert server.get("is_paused") == {"is_paused": False}


def test_a_plan_that_it_refuses_changes_nothing(server: Server, sync: rws.WeightSync, pairs_a: Pairs) -> None:
    sync.send_weights(pairs_a, version="good")
    tokens = server.all_tokens()
    half = {name: tensor for name, tensor in pairs_a.items() if "v_proj" not in name}
    with pytest.raises(rws.RoundAborted, match=r"qkv_proj.weight would be given .* the rest is missing") as caught:
        sync.send_weights(half, version="bad")
    assert (caught.value.phase, caught.value.replicas) == ("preflight", ("r0",))
    assert server.get("weight_info")["weight_version"] == "good"
    assert server.get("is_paused") == {"is_paused": False}
    assert server.all_tokens() == tokens


def test_a_request_in_flight_is_frozen_and_goes_on_with_the_new_weights(
    server: Server, sync: rws.WeightSync, pairs_a: Pairs, pairs_b: Pairs
) -> None:
    sync.send_weights(pairs_a, version="a")
    prompt, num_tokens = PROMPTS[0], 250
    by_a = server.tokens(prompt, num_tokens)
    staged = sync.stage_weights(pairs_b, version="b")
    with server.complete(prompt, num_tokens, stream=True) as response:
        lines = response.iter_lines()
        tokens = _token_ids(next(lines))
        assert tokens, "it has begun"
        sync.commit_weights(staged)
        for line in lines:
            tokens += _token_ids(line)
    by_b = server.tokens(prompt, num_tokens)
    assert len(tokens) == num_tokens
    assert by_a != tokens != by_b
    switch = next(place for place in range(num_tokens) if tokens[place] != by_a[place])
    assert switch > 0
    assert tokens[switch:] == server.tokens([*prompt, *tokens[:switch]], num_tokens - switch), "as if it had begun there"


def test_a_server_that_its_user_paused_gets_the_weights_and_stays_paused(
    server: Server, sync: rws.WeightSync, pairs_b: Pairs, fresh_b: dict[int, Tokens]
) -> None:
    client = rws.HTTPVLLMWeightSyncClient(server.url)
    client.pause_generation()
    sync.send_weights(pairs_b, version="while paused")
    assert server.get("is_paused") == {"is_paused": True}
    client.resume_generation()
    assert server.all_tokens() == fresh_b[1]


def test_the_same_server_under_two_urls_is_refused(server: Server) -> None:
    with pytest.raises(rws.AttachError, match="same engine"):
        rws.WeightSync.attach([server.url, server.url.replace("127.0.0.1", "localhost")])


def test_a_workers_own_words_arrive_through_the_wire_client(server: Server) -> None:
    client = rws.HTTPVLLMWeightSyncClient(server.url)
    with pytest.raises(rws.EngineCallError, match=r"rws: rank 0: .*unknown op 'dance'"):
        client.init_weight_transfer_engine({"op": "dance"})
    assert client.get_world_size() == [1]


def _token_ids(line: bytes) -> list[int]:
    """The tokens in one line of a stream of events."""
    data = line.removeprefix(b"data: ")
    if not data or data == b"[DONE]":
        return []
    return [token for choice in json.loads(data)["choices"] for token in choice["token_ids"] or ()]
