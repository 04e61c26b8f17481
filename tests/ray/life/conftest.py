"""Fleets as in the session tests, and what stays of a session in the cluster."""

from __future__ import annotations

import threading
from typing import Any

import ray
import torch

from ray_weightsync.engines.torch_gate import RequestAbortedError
from ray_weightsync.fleet import cluster
from tests.ray.session.conftest import LIMIT_S, start_fleet

__all__ = ["Traffic", "left_of", "start_fleet", "store_files"]


def store_files(name: str) -> list[str]:
    """Beginnings of the names in shared memory of the stores that the session ``name`` has now."""
    named = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    return [f"rws-{each.rpartition(':')[2]}-" for each in named if each.startswith(f"store:{name}:")]


def left_of(name: str) -> list[str]:
    """What stands in Ray's control plane of the session ``name``: named actors, journal, plans, claims."""
    actors = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if f":{name}" in each["name"]]
    claims = [key for key in cluster.keys("claim:") if f'"{name}"'.encode() in (cluster.get(key) or b"")]
    return [*actors, *cluster.keys(f"session:{name}"), *cluster.keys(f"plan:{name}:"), *claims]


class Traffic:
    """Requests in flight on every engine all the time. Each answer must be made with the weights of the version that it names."""

    def __init__(self, engines: list[Any], versions: dict[str, torch.nn.Module]) -> None:
        self._engines = engines
        self._versions = versions
        self._inputs = torch.arange(32, dtype=torch.float32).reshape(2, 16) / 7
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(engine,), daemon=True) for engine in engines]
        self.wrong: list[str] = []
        self.answered: list[str] = []

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(LIMIT_S)
            if thread.is_alive():
                self.wrong.append("a request waits for ever")
        assert self.wrong == []

    def _ask(self, engine: Any) -> None:
        while not self._over.is_set():
            try:
                output, version = ray.get(engine.forward_versioned.remote(self._inputs), timeout=LIMIT_S)
            except ray.exceptions.RayTaskError as error:
                if not isinstance(error.cause, RequestAbortedError):
                    self.wrong.append(str(error))
                self._over.wait(0.05)
                continue
            except Exception as error:
                self.wrong.append(str(error))
                return
            with torch.no_grad():
                if version not in self._versions or not torch.equal(output, self._versions[version](self._inputs)):
                    self.wrong.append(f"an answer of version {version} was made with other weights")
            self.answered.append(version)
