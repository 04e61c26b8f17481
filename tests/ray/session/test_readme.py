"""The README's code blocks run as they stand, in order, on engines of this process's cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import ray_weightsync as rws
from tests.ray.session.conftest import LIMIT_S, make_module

README = Path(__file__).parents[3] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_python_blocks_run_in_order(engine_pool: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    def train_one_step(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.5)

    another_engine = rws.TorchEngine.remote(make_module)
    names: dict[str, Any] = {
        "actors": engine_pool,
        "model": make_module(),
        "make_model": make_module,
        "train_one_step": train_one_step,
        "inputs": torch.ones(1, 16),
        "another_engine": another_engine,
        "__name__": "readme",
    }
    assert len(BLOCKS) == 5
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"README.md, python block {number}", "exec"), names)
        if number == 0:
            versions = ray.get([engine.get_weight_version.remote() for engine in engine_pool], timeout=LIMIT_S)
            assert versions == ["2"] * 3
    ray.kill(another_engine)
    assert names["report"].version == 1
    assert len(names["outputs"]) == 2
    assert "version 2 on 3 of 3 replicas" in capsys.readouterr().out


def test_the_first_screen_holds_the_sentence_the_install_the_attach_and_the_two_commands() -> None:
    first_screen = "\n".join(README.read_text().splitlines()[:30])
    for part in ("pip install ray_weightsync", "WeightSync.attach(", "send_weights(", "make demo", "make test"):
        assert part in first_screen


def test_the_attach_block_has_eight_lines_of_code() -> None:
    lines = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert len(lines) <= 8
