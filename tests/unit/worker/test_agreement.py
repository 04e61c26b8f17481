"""Words between the ranks of an engine, over a real store, with a deadline that bounds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from ray_weightsync.worker.agreement import KEPT_CALLS, StoreAgreement, over_world_group
from ray_weightsync.worker.seams import SoleRank


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)


@pytest.fixture
def ranks(store: dist.TCPStore) -> list[StoreAgreement]:
    return [StoreAgreement(store.clone(), rank, 3) for rank in range(3)]


def together(ranks: list[StoreAgreement], words: list[str | None], limit_s: float = 10) -> list[list[str | None]]:
    """What each rank learns when all of them gather."""
    learned: list[list[str | None]] = [[] for _ in ranks]

    def run(index: int) -> None:
        learned[index] = ranks[index].gather(words[index], limit_s)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return learned


class TestStoreAgreement:
    def test_every_rank_learns_every_ranks_words(self, ranks: list[StoreAgreement]) -> None:
        words = [None, "", 'späte "Worte"\n\x00 \ud800']
        assert together(ranks, words) == [words, words, words]

    def test_the_words_of_one_exchange_are_not_those_of_the_next(self, ranks: list[StoreAgreement]) -> None:
        together(ranks, ["a", "b", "c"])
        assert together(ranks, [None, None, None]) == [[None] * 3] * 3

    def test_a_silent_rank_is_named_within_the_limit_and_the_others_are_heard(self, ranks: list[StoreAgreement]) -> None:
        began = time.monotonic()
        learned = together([ranks[0], ranks[2]], ["first", "third"], limit_s=0.5)
        assert time.monotonic() - began < 5
        assert learned == [["first", "did not answer the other ranks within 0.5 s", "third"]] * 2

    def test_a_rank_that_comes_late_hears_the_others_and_the_next_exchange_works(self, ranks: list[StoreAgreement]) -> None:
        together([ranks[0], ranks[2]], ["first", "third"], limit_s=0.2)
        assert ranks[1].gather("late", 0.2) == ["first", "late", "third"]
        assert together(ranks, ["a", None, "c"]) == [["a", None, "c"]] * 3

    def test_several_silent_ranks_share_one_limit(self, ranks: list[StoreAgreement]) -> None:
        began = time.monotonic()
        learned = ranks[0].gather("alone", 0.4)
        assert time.monotonic() - began < 3
        assert [said is not None and "did not answer" in said for said in learned] == [False, True, True]

    def test_the_store_does_not_grow_with_the_number_of_exchanges(self, store: dist.TCPStore, ranks: list[StoreAgreement]) -> None:
        def after(exchanges: int) -> int:
            for _ in range(exchanges):
                together(ranks, ["a", "b", "c"])
            return int(store.num_keys())

        settled = after(KEPT_CALLS + 1)
        assert after(20) == settled

    def test_a_wait_does_not_hold_up_others_on_the_store(self, store: dist.TCPStore) -> None:
        waiting = threading.Thread(target=StoreAgreement(store.clone(), 0, 2).gather, args=(None, 30))
        waiting.start()
        began = time.monotonic()
        store.set("somebody", "else")
        assert store.get("somebody") == b"else"
        assert time.monotonic() - began < 5
        StoreAgreement(store.clone(), 1, 2).gather(None, 30)
        waiting.join(30)
        assert not waiting.is_alive()

    def test_a_store_that_is_gone_is_an_error(self) -> None:
        served = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
        rank = StoreAgreement(served.clone(), 0, 2)
        del served
        with pytest.raises(RuntimeError):
            rank.gather(None, 5)


class TestOverWorldGroup:
    def test_one_worker_touches_no_group(self) -> None:
        class Group:
            world_size = 1
            rank_in_group = 0

            @property
            def cpu_group(self) -> Any:
                raise AssertionError("an engine with one worker has nobody to ask")

        for agreement in over_world_group(Group(), 1):
            assert isinstance(agreement, SoleRank)
            assert agreement.gather("mine", 1) == ["mine"]

    def test_data_parallel_engines_in_one_world_group_agree_each_for_itself_and_all_together(self, store: dist.TCPStore) -> None:
        group = SimpleNamespace(get_group_store=lambda: store)
        both = [over_world_group(SimpleNamespace(world_size=4, rank_in_group=rank, cpu_group=group), 2) for rank in range(4)]
        own, everyone = ([pair[each] for pair in both] for each in (0, 1))
        assert together(own[:2], ["a", "b"]) == [["a", "b"]] * 2  # type: ignore[arg-type]
        assert together(own[2:], ["c", "d"]) == [["c", "d"]] * 2  # type: ignore[arg-type]
        assert together(everyone, list("abcd")) == [list("abcd")] * 4  # type: ignore[arg-type]
        silent = "did not answer the other ranks within 0.2 s"
        assert together([own[0], own[3]], ["a", "d"], limit_s=0.2) == [["a", silent], [silent, "d"]]  # type: ignore[list-item]
        assert [(each.rank, each.world_size) for each in own] == [(0, 2), (1, 2)] * 2

    def test_data_parallel_engines_of_one_worker_ask_nobody_until_all_agree(self, store: dist.TCPStore) -> None:
        group = SimpleNamespace(get_group_store=lambda: store)
        both = [over_world_group(SimpleNamespace(world_size=2, rank_in_group=rank, cpu_group=group), 1) for rank in range(2)]
        assert [own.gather("mine", 1) for own, _ in both] == [["mine"]] * 2
        assert together([everyone for _, everyone in both], ["a", "b"]) == [["a", "b"]] * 2  # type: ignore[misc]

    def test_two_processes_of_one_gloo_group_agree_and_the_group_survives_a_silent_rank(self) -> None:
        results = mp.get_context("spawn").SimpleQueue()
        listening = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
        spawned = mp.start_processes(_gloo_rank, (listening.port, results), nprocs=2, join=False, start_method="spawn")
        assert spawned is not None
        deadline = time.monotonic() + 120
        while not spawned.join(max(0.1, deadline - time.monotonic())):  # returns at the first process that ends
            assert time.monotonic() < deadline
        found = dict(_drain(results))
        assert found[0] == ["zero", "did not answer the other ranks within 0.3 s", "sum 3"]
        assert found[1] == ["zero", "one", "sum 3"]


def _drain(queue: Any) -> Iterator[tuple[int, list[str | None]]]:
    while not queue.empty():
        yield queue.get()


def _gloo_rank(rank: int, port: int, results: Any) -> None:
    """Rank 1 is silent until rank 0 has given up on it; then both use the group itself."""
    import torch

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=2)
    group = dist.new_group([0, 1], backend="gloo")
    agreement, everyone = over_world_group(SimpleNamespace(world_size=2, rank_in_group=rank, cpu_group=group), 2)
    assert everyone is agreement
    if rank == 1:
        store.wait(["rank 0 gave up"])
    learned = agreement.gather("zero" if rank == 0 else "one", 0.3)
    store.set("rank 0 gave up", "yes")
    total = torch.tensor([rank + 1])
    dist.all_reduce(total, group=group)
    results.put((rank, [*learned, f"sum {int(total)}"]))
    dist.destroy_process_group()
