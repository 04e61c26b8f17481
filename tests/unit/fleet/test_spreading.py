"""Who serves whom."""

from __future__ import annotations

import asyncio
from collections import Counter

from ray_weightsync.fleet.spreading import FAN_OUT, spread


def test_whoever_has_the_bytes_serves_others_and_nobody_serves_more_than_a_few_at_once() -> None:
    sent: list[tuple[str, str]] = []
    at_once: Counter[str] = Counter()
    waves: dict[str, int] = {"s": 0}

    async def copy(source: str, target: str) -> None:
        assert source in waves, "it has nothing to give"
        at_once[source] += 1
        assert at_once[source] <= FAN_OUT
        await asyncio.sleep(0)
        at_once[source] -= 1
        sent.append((source, target))
        waves[target] = waves[source] + 1

    targets = [f"t{index}" for index in range(26)]
    asyncio.run(asyncio.wait_for(spread(["s"], targets, copy), 10))
    assert sorted(target for _, target in sent) == sorted(targets)
    assert len({source for source, _ in sent}) > 5


def test_one_that_fails_serves_nobody_and_the_others_are_served() -> None:
    served: list[str] = []

    async def copy(source: str, target: str) -> None:
        assert source != "t0"
        if target == "t0":
            raise OSError
        served.append(target)

    asyncio.run(asyncio.wait_for(spread(["s"], [f"t{index}" for index in range(9)], copy), 10))
    assert len(served) == 8
