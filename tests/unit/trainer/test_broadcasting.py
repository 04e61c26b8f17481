"""The trainer's part in a broadcast, with a coordinator that is made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ray_weightsync.config import Collective, Timeouts
from ray_weightsync.fleet.topology import Shape, group_of
from ray_weightsync.trainer import live
from ray_weightsync.trainer.broadcasting import Broadcasting
from ray_weightsync.transports.collective.rendezvous import GroupError
from ray_weightsync.weights.plan import Plan
from ray_weightsync.weights.sources import StateDictSource


class Link:
    """The group has two engines, and one of them will not receive."""

    def submit(self, verb: str, *args: Any) -> str:
        return verb

    def wait(self, pending: str, what: str, *, limit_s: float) -> Any:
        return group_of([Shape(id=name, world_size=1) for name in ("r0", "r1")])


def test_a_sender_whose_group_will_not_be_complete_is_told_so_by_the_coordinator_and_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = SimpleNamespace(wait=lambda refs, *, timeout: (refs, []), get=lambda ref, *, timeout: "r1: made to fail in update")
    monkeypatch.setattr(live, "ray", told)
    source, options, link = StateDictSource({"a": torch.ones(4)}), Collective(interface="lo"), Link()
    plan = Plan.from_metadata(source.metadata())
    refused = pytest.raises(GroupError, match="r1: made to fail in update")
    with Broadcasting(link, options, Timeouts(update_s=30)) as sending, refused:  # type: ignore[arg-type]
        sending.send("round", source, plan)
