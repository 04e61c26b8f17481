"""Spawning: all replicas up, or an error that says why and nothing left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import ray
import torch

from ray_weightsync.engines.specs import TorchEngineSpec
from ray_weightsync.errors import AttachError

LIMIT_S = 120.0


def make_module() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


def test_every_replica_is_up_when_spawn_returns() -> None:
    handles = TorchEngineSpec(make_module, num_replicas=2, env={"RWS_SPAWN_TEST": "yes"}).spawn(LIMIT_S)
    assert len(set(handles)) == 2
    assert [ray.get(handle.is_paused.remote()) for handle in handles] == [False, False]
    assert ray.get(handles[0].__ray_call__.remote(lambda actor: os.environ["RWS_SPAWN_TEST"])) == "yes"
    for handle in handles:
        ray.kill(handle)


def test_one_that_cannot_start_ends_the_others_and_its_words_are_said(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()

    def fails_once() -> torch.nn.Module:
        # The first that comes creates the file and fails; it is the only one.
        try:
            os.close(os.open(tmp_path / "first", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            (pids / str(os.getpid())).touch()
            return make_module()
        raise RuntimeError("no checkpoint there")

    with pytest.raises(AttachError, match="failed to start; the others were stopped") as raised:
        TorchEngineSpec(fails_once, num_replicas=3).spawn(LIMIT_S)
    assert "no checkpoint there" in str(raised.value)
    assert raised.value.log_hint is not None
    for pid in pids.iterdir():
        _gone(int(pid.name))


def test_more_than_the_cluster_has_is_said_after_the_limit_with_what_is_free() -> None:
    with pytest.raises(AttachError, match="engines 0, 1 of 2 were not up in time") as raised:
        TorchEngineSpec(make_module, num_replicas=2, num_cpus=10_000).spawn(1.0)
    said = str(raised.value)
    assert "2 x 10000 CPU asked for" in said
    assert raised.value.limit_s == 1.0


def _gone(pid: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)
