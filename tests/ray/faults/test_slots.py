"""A slot that a hung engine still holds is not written to again."""

from __future__ import annotations

import pytest

import ray_weightsync as rws
from ray_weightsync.testing import Faults
from tests.ray.faults.ground import LIMIT_S, Ground


def test_a_slot_that_a_hung_engine_holds_is_retired_for_a_fresh_one_and_the_report_says_so(ground: Ground) -> None:
    with Faults(ground.sync, limit_s=LIMIT_S) as faults:
        fault = faults.inject("r1", "load", "hang", rank=0)
        with pytest.raises(rws.ReplicasLost):
            ground.send()
        reports = [ground.send() for _ in range(3)]
        assert all(report.committed == ("r0", "r2") for report in reports)
        assert not any("retired" in note for note in reports[0].notes), "two slots do until the one that is held is wanted"
        assert any("1 slots retired" in note for note in reports[-1].notes)
        ground.check()
        fault.release()
