"""Who serves whom."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection

from hypothesis import given, settings
from hypothesis import strategies as st

from ray_weightsync.fleet.spreading import FAN_OUT, SourceLost, spread


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


class Dying:
    """Nodes that copy. Each dies after so many of its copies have begun; none of those under way gets through.

    Attributes:
        begun: The copies, in the order in which they began.
        served: Who has got the bytes.
        without: Targets that cannot be served by anybody.
    """

    def __init__(self, dies_after: dict[str, int], without: Collection[str] = ()) -> None:
        self._dies_after = dies_after
        self.begun: list[tuple[str, str]] = []
        self.served: set[str] = set()
        self.without = set(without)

    def is_dead(self, node: str) -> bool:
        return node in self._dies_after and sum(source == node for source, _ in self.begun) > self._dies_after[node]

    async def copy(self, source: str, target: str) -> None:
        self.begun.append((source, target))
        await asyncio.sleep(0)
        if self.is_dead(source):
            raise SourceLost(source)
        if target in self.without:
            raise OSError(target)
        assert target not in self.served, "it has the bytes already"
        self.served.add(target)

    def spread(self, sources: list[str], targets: list[str]) -> None:
        asyncio.run(asyncio.wait_for(spread(sources, targets, self.copy), 10))


def test_a_source_that_dies_is_asked_no_more_and_who_it_was_serving_is_served_by_another() -> None:
    nodes = Dying({"dies": 0})
    nodes.spread(["dies", "lives"], [f"t{index}" for index in range(9)])
    assert len(nodes.served) == 9
    assert Counter(source for source, _ in nodes.begun)["dies"] <= FAN_OUT, "those that were under way"


def test_who_waits_for_one_that_is_being_served_is_served_by_it_when_the_source_has_died() -> None:
    nodes = Dying({"s": 0})
    got = asyncio.Event()

    async def copy(source: str, target: str) -> None:
        if (source, target) == ("s", "t0"):  # it has got all of the bytes just before the source died
            await got.wait()
            nodes.served.add(target)
            return
        try:
            await nodes.copy(source, target)
        finally:
            got.set()

    asyncio.run(asyncio.wait_for(spread(["s"], ["t0", "t1", "t2"], copy), 10))
    assert nodes.served == {"t0", "t1", "t2"}


def test_with_no_source_left_it_ends_and_the_targets_stay_without() -> None:
    nodes = Dying({"s": 0})
    nodes.spread(["s"], [f"t{index}" for index in range(9)])
    assert (nodes.served, len(nodes.begun)) == (set(), FAN_OUT)
    nodes.spread([], ["t0"])
    assert nodes.served == set()


@settings(deadline=None, print_blob=True)
@given(
    num_sources=st.integers(0, 3),
    num_targets=st.integers(0, 8),
    dies_after=st.dictionaries(st.integers(0, 10), st.integers(0, 3)),
    without=st.sets(st.integers(0, 7)),
)
def test_whoever_dies_every_target_is_served_for_which_a_source_is_left(
    num_sources: int, num_targets: int, dies_after: dict[int, int], without: set[int]
) -> None:
    sources, targets = [f"s{index}" for index in range(num_sources)], [f"t{index}" for index in range(num_targets)]
    names = sources + targets
    nodes = Dying({names[at]: after for at, after in dies_after.items() if at < len(names)}, [f"t{index}" for index in without])
    nodes.spread(sources, targets)
    assert nodes.served.isdisjoint(nodes.without)
    missing = set(targets) - nodes.served - nodes.without
    assert not missing or all(nodes.is_dead(node) for node in [*sources, *nodes.served])
    for target in targets:
        tried = [source for source, to in nodes.begun if to == target]
        assert len(tried) == len(set(tried)), "nobody is asked twice for the same"
