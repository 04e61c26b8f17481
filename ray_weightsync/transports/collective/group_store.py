"""One rank's words with the others of its group, beside the data: who has joined, who failed and why, who is done.

An aborted NCCL peer does not make the others fail, and a gloo peer that closes does not say why. So whoever fails says so in the
store, once; all waits look there. The store lives in the sender's process: when that dies, every look fails at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in torch's __all__

from ray_weightsync.transports.collective.deadline import Deadline
from ray_weightsync.transports.collective.rendezvous import SENDER, GroupError, Rendezvous, nonce_key

Answer = TypeVar("Answer")

FAREWELL_S = 5.0
"""Seconds for which a rank that is done waits for those that are not, which may still need it."""

_HALTED = "this rank was told to stop"
_LOOK_S = 0.2
_MIN_POLL_S = 0.002
_MAX_POLL_S = 0.1


class GroupStore:
    """A rank's connection to the store. Safe for several threads: no call of its own blocks in the store.

    Raises:
        GroupError: if the store cannot be reached in time.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int, deadline: Deadline) -> None:
        self.rendezvous = rendezvous
        self.rank = rank
        self._halted = threading.Event()
        self._store: Any = connected(rendezvous.address, rendezvous.port, deadline)  # Any: clone() is not in torch's type stubs

    def join(self, deadline: Deadline) -> None:
        """Meet the other ranks: on return, all of them are there.

        Raises:
            TimeoutError: naming the ranks that are missing, if they are known here.
            GroupError: if one of them failed.
        """
        self._set(f"joined/{self.rank}")
        others = [rank for rank in range(self.rendezvous.world_size) if rank != SENDER]
        if self.rank != SENDER:
            if not self._poll(lambda: self._has("complete"), deadline):
                raise TimeoutError(self._waited(deadline, "all others, which the sender would have said"))
            return
        if not self._poll(lambda: not self._lacking("joined", others), deadline):
            missing = ", ".join(map(str, self._lacking("joined", others)))
            raise TimeoutError(self._waited(deadline, f"ranks that did not join: {missing}"))
        self._set("complete")

    def for_backend(self) -> PrefixStore:
        """A connection of its own, under keys of its own, for the backend to meet by: it blocks in its waits."""
        return PrefixStore(self._key("backend"), self._store.clone())

    def fail(self, words: str) -> None:
        """Tell all others that this rank has failed. The first words in a group are the ones that count."""
        self._ask(lambda: self._store.compare_set(self._key("failed"), "", f"rank {self.rank}: {words}"))

    def failure(self) -> str | None:
        """Why the group failed, in the words of the rank that failed first.

        Raises:
            GroupError: if the store, and with it the sender, is gone.
        """
        if not self._has("failed"):
            return None
        return str(self._ask(lambda: self._store.get(self._key("failed"))).decode())

    def leave(self) -> None:
        """Say that this rank needs nothing more of the others."""
        self._set(f"left/{self.rank}")

    def silent(self, limit_s: float) -> list[int]:
        """The ranks that joined, but have not left within ``limit_s`` seconds. In a group that failed, those that are gone."""
        if self.wait_left(limit_s):
            return []
        return [rank for rank in self._lacking("left", range(self.rendezvous.world_size)) if self._has(f"joined/{rank}")]

    def wait_left(self, limit_s: float) -> bool:
        """Wait until every rank has left; False if some have not within ``limit_s`` seconds, or the sender is gone."""
        try:
            return self._poll(lambda: not self._lacking("left", range(self.rendezvous.world_size)), Deadline(limit_s), heed_failure=False)
        except GroupError:
            return False  # a sender that has closed its store needs nobody any more

    def halt(self) -> None:
        """End every wait of this rank here. Idempotent."""
        self._halted.set()

    @property
    def halted(self) -> bool:
        return self._halted.is_set()

    def _poll(self, ready: Callable[[], bool], deadline: Deadline, *, heed_failure: bool = True) -> bool:
        pause_s = _MIN_POLL_S
        while not ready():
            if heed_failure and (words := self.failure()) is not None:
                raise GroupError(words)
            if deadline.passed:
                return False
            if self._halted.wait(min(pause_s, deadline.left_s)):
                raise GroupError(_HALTED)
            pause_s = min(2 * pause_s, _MAX_POLL_S)
        return True

    def _lacking(self, what: str, ranks: Iterable[int]) -> list[int]:
        keys = {rank: f"{what}/{rank}" for rank in ranks}
        if self._has(*keys.values()):
            return []
        return [rank for rank, key in keys.items() if not self._has(key)]

    def _waited(self, deadline: Deadline, what: str) -> str:
        size = self.rendezvous.world_size
        return f"waited {deadline.limit_s:.1f} s for {what} (group {self.rendezvous.id} of {size} ranks)"

    def _key(self, name: str) -> str:
        return f"rws/{self.rendezvous.id}/{name}"

    def _has(self, *names: str) -> bool:
        return bool(self._ask(lambda: self._store.check([self._key(name) for name in names])))

    def _set(self, name: str) -> None:
        self._ask(lambda: self._store.set(self._key(name), "1"))

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except DistError as error:
            where = f"{self.rendezvous.address}:{self.rendezvous.port}"
            raise GroupError(f"the sender of group {self.rendezvous.id} is gone: its store at {where} does not answer any more") from error


def heeding(store: GroupStore | None, wait: Callable[[float], Answer | None], deadline: Deadline) -> Answer | None:
    """What ``wait`` (told for how many seconds) gives, or None at the deadline. Meanwhile the group's failure is looked for.

    Raises:
        GroupError: if the group failed, in the words of the rank that failed first, or the sender is gone, or this rank was told to stop.
    """
    while True:
        answer = wait(min(_LOOK_S, deadline.left_s))
        if answer is not None:
            return answer
        if store is not None and store.halted:
            raise GroupError(_HALTED)
        if store is not None and (words := store.failure()) is not None:
            if (answer := wait(0)) is not None:  # which raises, if this rank itself knows better what happened
                return answer
            raise GroupError(words)
        if deadline.passed:
            return None


def connected(address: str, port: int, deadline: Deadline) -> TCPStore:
    """A connection to the store at this address.

    torch looks up the name of every address it connects to: a name server that does not answer costs each connection its own timeout
    (5 s a try unless RES_OPTIONS says otherwise; seen on torch 2.13, over loopback too).

    Raises:
        GroupError: if it cannot be reached in time.
    """
    try:
        return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=deadline.as_timeout())
    except DistError as error:
        raise GroupError(
            f"the sender's store at {address}:{port} cannot be reached from here within {deadline.limit_s:.1f} s: {error};"
            " is another interface meant (Collective(interface=...)), is a firewall in between, or does the name server not answer?"
        ) from error


def see(address: str, port: int, nonce: str, limit_s: float) -> None:
    """Prove that the store at this address can be reached, and is the one whose nonce this is.

    Raises:
        GroupError: if it cannot be reached, or is another one.
    """
    store: Any = connected(address, port, Deadline(limit_s))
    if not store.check([nonce_key(nonce)]):
        raise GroupError(f"the store at {address}:{port} is not the sender's: it does not know group {nonce}")
