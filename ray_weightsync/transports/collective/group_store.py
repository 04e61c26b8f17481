"""One rank's words with the others of its group, beside the data: who has joined, who failed and why, who is done.

An aborted NCCL peer does not make the others fail, and a gloo peer that closes does not say why. So whoever fails says so in the
store, once; all waits look there. The store lives in the sender's process: when that dies, every look and every wait fails at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from datetime import timedelta
from typing import TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]  # not in torch's __all__

from ray_weightsync.transports.collective.deadline import Deadline
from ray_weightsync.transports.collective.rendezvous import SENDER, GroupError, Rendezvous
from ray_weightsync.transports.collective.store_client import StoreClient, StoreGone, StoreRefused, Values

Answer = TypeVar("Answer")

FAREWELL_S = 5.0
"""Seconds for which a rank that is done waits for those that are not, which may still need it."""

ANSWER_S = 30.0
"""Most seconds that the store may take to answer: it shares a process, and Python's lock, with a trainer that may be busy."""

_FAILED = "failed"
HALTED = "this rank was told to stop"
_LATE_S = 2.0


class GroupStore:
    """A rank's connection to the store, to be closed when the rank has left. Safe for several threads.

    Raises:
        GroupError: if the store cannot be reached in time.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int, deadline: Deadline) -> None:
        self.rendezvous = rendezvous
        self.rank = rank
        self._deadline = deadline
        self._halted = False
        self._waiting: set[futures.Future[Values]] = set()
        self._lock = threading.Lock()
        self._client = connected(rendezvous.address, rendezvous.port, rendezvous.id, deadline)

    def join(self, deadline: Deadline) -> None:
        """Meet the other ranks: on return, all of them are there.

        Raises:
            TimeoutError: naming the ranks that are missing, if they are known here.
            GroupError: if one of them failed.
        """
        self._set(_joined(self.rank))
        if self.rank != SENDER:
            if not self.await_values(["complete"], deadline):
                raise TimeoutError(self._waited(deadline, "all others, which the sender would have said"))
            return
        others = [rank for rank in range(self.rendezvous.world_size) if rank != SENDER]
        there = self.await_values([_joined(rank) for rank in others], deadline)
        if len(there) < len(others):
            missing = ", ".join(str(rank) for rank in others if _joined(rank) not in there)
            raise TimeoutError(self._waited(deadline, f"ranks that did not join: {missing}"))
        self._set("complete")

    def for_backend(self) -> Store:
        """The store as gloo takes it, under keys of its own. To be kept as long as the backend."""
        return BackendStore(self)

    def fail(self, words: str) -> None:
        """Tell all others that this rank has failed. The first words in a group are the ones that count."""
        self._ask(lambda: self._client.compare_set(_FAILED, None, f"rank {self.rank}: {words}".encode(), limit_s=self._answer_s))

    def failure(self) -> str | None:
        """Why the group failed, in the words of the rank that failed first.

        Raises:
            GroupError: if the store, and with it the sender, is gone.
        """
        words = self._ask(lambda: self._client.values([_FAILED], limit_s=self._answer_s)).get(_FAILED)
        return None if words is None else words.decode()

    def leave(self) -> None:
        """Say that this rank needs nothing more of the others."""
        self._set(_left(self.rank))

    def silent(self, limit_s: float) -> list[int]:
        """The ranks that joined, but have not left within ``limit_s`` seconds, even if this one was told to stop."""
        ranks = range(self.rendezvous.world_size)
        joined = self._ask(lambda: self._client.values([_joined(rank) for rank in ranks], limit_s=self._answer_s))
        expected = [rank for rank in ranks if _joined(rank) in joined]
        left = self.await_values([_left(rank) for rank in expected], Deadline(limit_s), heed_failure=False, heed_halt=False)
        return [rank for rank in expected if _left(rank) not in left]

    def wait_left(self, limit_s: float) -> None:
        """Wait until every rank has left, at most ``limit_s`` seconds, and no longer than the sender has its store."""
        try:
            self.await_values([_left(rank) for rank in range(self.rendezvous.world_size)], Deadline(limit_s), heed_failure=False)
        except GroupError:
            return  # a sender that has closed its store needs nobody any more

    @property
    def halted(self) -> bool:
        """Whether this rank was told to stop."""
        return self._halted

    def halt(self) -> None:
        """End every wait of this rank here. Idempotent."""
        with self._lock:
            self._halted = True
            for waiting in self._waiting:
                waiting.cancel()

    def set_value(self, key: str, value: bytes) -> None:
        """Give a key of the group's a value.

        Raises:
            GroupError: if the store is gone.
        """
        self._ask(lambda: self._client.set(key, value, limit_s=self._answer_s))

    def await_values(self, keys: Sequence[str], deadline: Deadline, *, heed_failure: bool = True, heed_halt: bool = True) -> Values:
        """Wait until all ``keys`` are there. At the deadline: the values of those that are.

        Raises:
            GroupError: if the group failed, in the words of the rank that failed first, or the store is gone, or `halt` was called.
        """
        limit_s = deadline.left_s
        waiting = self._ask(lambda: self._client.wait(keys, limit_s, unless=_FAILED if heed_failure else None))
        if heed_halt:
            with self._lock:
                self._waiting.add(waiting)
                if self._halted:
                    waiting.cancel()
        try:
            values = self._ask(lambda: self._client.answer(waiting, limit_s + _LATE_S))
        except futures.CancelledError as error:
            raise GroupError(HALTED) from error
        finally:
            with self._lock:
                self._waiting.discard(waiting)
        if len(values) < len(keys) and heed_failure and (words := self.failure()) is not None:
            raise GroupError(words)
        return values

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._client.close()

    @property
    def _answer_s(self) -> float:
        return max(_LATE_S, min(ANSWER_S, self._deadline.left_s))

    def _waited(self, deadline: Deadline, what: str) -> str:
        size = self.rendezvous.world_size
        return f"waited {deadline.limit_s:.1f} s for {what} (group {self.rendezvous.id} of {size} ranks)"

    def _set(self, key: str) -> None:
        self.set_value(key, b"1")

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        try:
            return question()
        except StoreRefused as error:
            raise GroupError(f"group {self.rendezvous.id}: {error}") from error
        except StoreGone as error:
            raise GroupError(f"the sender of group {self.rendezvous.id} is gone: {error}") from error


class BackendStore(Store):
    """What `ProcessGroupGloo` exchanges addresses through: it calls ``set``, ``wait`` and ``get``, in this order (torch 2.13).

    What a rank waits for here, the others are about to send: all have joined. So a group that has failed meanwhile is completed all the
    same: a rank that stayed away now would leave the others in gloo's own waits for a connection from it, which nothing ends.
    """

    def __init__(self, store: GroupStore) -> None:
        super().__init__()
        self._store = store
        self._there: Values = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # from C++ they are bytes
        """Give ``key`` a value."""
        self._store.set_value(_backend(key), value)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:  # type: ignore[override]  # gloo always says how long
        """Wait until all ``keys`` are there.

        Raises:
            TimeoutError: if they are not within ``timeout``.
            GroupError: if the store is gone.
        """
        within = Deadline(timeout.total_seconds())
        there = self._store.await_values([_backend(key) for key in keys], within, heed_failure=False, heed_halt=False)
        self._there.update(there)
        if missing := [key for key in keys if _backend(key) not in there]:
            raise TimeoutError(f"joining was not over after {timeout.total_seconds():.1f} s: gloo waited for {', '.join(missing)}")

    def get(self, key: str) -> bytes:
        """The value of a key that was waited for."""
        return self._there[_backend(key)]


def _joined(rank: int) -> str:
    return f"joined/{rank}"


def _left(rank: int) -> str:
    return f"left/{rank}"


def _backend(key: str) -> str:
    return f"backend/{key}"


def connected(address: str, port: int, nonce: str, deadline: Deadline) -> StoreClient:
    """A connection to the store at this address.

    Raises:
        GroupError: if it cannot be reached in time.
    """
    try:
        return StoreClient(address, port, nonce, deadline.left_s)
    except StoreGone as error:
        raise GroupError(
            f"the sender's store at {address}:{port} cannot be reached from here within {deadline.limit_s:.1f} s: {error};"
            " is another interface meant (Collective(interface=...)), or is a firewall in between?"
        ) from error


def see(address: str, port: int, nonce: str, limit_s: float) -> None:
    """Prove that the store at this address can be reached, and is the one whose nonce this is.

    Raises:
        GroupError: if it cannot be reached, or is another one.
    """
    deadline = Deadline(limit_s)
    with connected(address, port, nonce, deadline) as client:
        try:
            client.values(["seen"], limit_s=deadline.left_s)
        except StoreRefused as error:
            raise GroupError(f"the store at {address}:{port} is not the sender's: {error}") from error
        except StoreGone as error:
            raise GroupError(f"the sender's store at {address}:{port} was reached from here, and did not answer: {error}") from error
