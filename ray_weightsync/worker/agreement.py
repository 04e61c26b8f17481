"""How the workers of one vLLM engine exchange words, with a deadline that really bounds.

The words go through the key-value store behind vLLM's CPU world group, not through a collective on it. A gloo collective
knows two kinds of deadline, both wrong here: the group's (30 minutes) breaks every pair of the group when it strikes, and
with it vLLM's own traffic; a wait given up in Python leaves the operation behind in the group's queue, and neither says who
is missing. A store has none of that: each rank writes its words once, a rank that waits in vain knows for whom, a rank that
comes late finds what the others said, and nothing is left broken. An exchange between two ranks takes some 0.2 ms.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from ray_weightsync.worker.seams import Agreement, SoleRank

KEPT_CALLS = 8
"""Exchanges whose words stay in the store. A rank that far behind is lost anyway: nobody calls an engine anew before it answered."""


class Store(Protocol):
    """What is used of a `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def delete_key(self, key: str, /) -> bool: ...


class StoreAgreement:
    """An exchange of words between ``world_size`` ranks through a store that all of them reach.

    Args:
        store: Its own connection to the store: a wait holds the connection, and must hold up nobody else's.
        rank: This rank, from 0.
        world_size: Number of ranks. Each must construct one of these, and call `gather` equally often.
        name: Of those who agree, where several agreements go through one store.
    """

    def __init__(self, store: Store, rank: int, world_size: int, name: str = "rws") -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._name = name
        self._calls = 0

    def gather(self, words: str | None, limit_s: float) -> list[str | None]:
        """Every rank's words in rank order, after at most ``limit_s`` seconds; a silent rank's words say that it is silent.

        Raises:
            RuntimeError: if the store cannot be reached (the process that keeps it is gone).
        """
        until = time.monotonic() + limit_s
        call, self._calls = self._calls, self._calls + 1
        self._store.set(self._key(call, self.rank), json.dumps(words))
        if call >= KEPT_CALLS:
            self._store.delete_key(self._key(call - KEPT_CALLS, self.rank))
        return [words if rank == self.rank else self._words_of(call, rank, until, limit_s) for rank in range(self.world_size)]

    def _words_of(self, call: int, rank: int, until: float, limit_s: float) -> str | None:
        key = self._key(call, rank)
        if not self._store.check([key]):  # asked first: one silent rank uses up the time, the ranks after it have spoken long ago
            try:
                # Some time always: torch takes a timeout of zero for none at all.
                self._store.wait([key], timedelta(seconds=max(0.001, until - time.monotonic())))
            except dist.DistStoreError:
                return f"did not answer the other ranks within {limit_s:.1f} s"
        words = json.loads(self._store.get(key))
        return None if words is None else str(words)

    def _key(self, call: int, rank: int) -> str:
        return f"{self._name}/{call}/{rank}"


class _WorldGroup(Protocol):
    """What is used of vLLM's ``GroupCoordinator``."""

    world_size: int
    rank_in_group: int
    cpu_group: Any  # a ProcessGroup; its get_group_store() and the store's clone() are not in torch's type stubs


def over_world_group(group: _WorldGroup, engine_size: int) -> tuple[Agreement, Agreement]:
    """The agreement of one engine's workers, and that of all in vLLM's world group; no group is touched where there is one worker.

    They differ where the data-parallel engines of a mixture-of-experts model share one world group. Only their outcome is agreed on by
    all: while they serve, a worker that waits for another engine's would hold up the step that the other one is in.

    Args:
        group: vLLM's world group in this worker.
        engine_size: Workers of one engine, tensor x pipeline (x context) parallel; they follow one another in the group.
    """
    if group.world_size == 1:
        return SoleRank(), SoleRank()
    store, rank = group.cpu_group.get_group_store(), group.rank_in_group
    everyone = StoreAgreement(store.clone(), rank, group.world_size)
    if engine_size == group.world_size:
        return everyone, everyone
    index, rank_in_engine = divmod(rank, engine_size)
    own = SoleRank() if engine_size == 1 else StoreAgreement(store.clone(), rank_in_engine, engine_size, f"rws-engine-{index}")
    return own, everyone
