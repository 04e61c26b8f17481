"""The thread that owns one rank's communicator: sender and receivers join, fail and leave alike; what they do in between differs."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ray_weightsync.transports.collective.communicator import Communicator, buffer_device, join
from ray_weightsync.transports.collective.deadline import Deadline
from ray_weightsync.transports.collective.group_store import FAREWELL_S, HALTED, Answer, GroupStore
from ray_weightsync.transports.collective.handover import Handover
from ray_weightsync.transports.collective.rendezvous import SENDER, GroupError, Rendezvous
from ray_weightsync.worker.payload import words_of

FAILED_FAREWELL_S = 1.0
"""Seconds that the sender of a group that failed waits for the others to say that they have left: long enough to read why."""

_LOOK_S = 0.2


class Member(threading.Thread, ABC):
    """A daemon thread. It ends when its work is done, when its side or the group failed, or at the deadline.

    Args:
        rendezvous: The group.
        rank: This rank.
        deadline: For everything.
        handover: What goes to or comes from the other thread of this side. How this thread ended is told through it.

    Attributes:
        store: Its connection to the group's store, once there is one. It is closed when the thread ends.
        device: Where the buffers have to be: chosen by the thread that makes this one.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int, deadline: Deadline, handover: Handover[Any]) -> None:
        super().__init__(name=f"rws-rank-{rank}-{rendezvous.id[:8]}", daemon=True)
        self.store: GroupStore | None = None
        self.device = buffer_device(rendezvous.backend)
        self._rendezvous = rendezvous
        self._rank = rank
        self._deadline = deadline
        self._handover = handover
        self._communicator: Communicator | None = None
        self._halted = False

    @abstractmethod
    def work(self, communicator: Communicator) -> None:
        """All that this rank does in the group."""

    @abstractmethod
    def progress(self) -> str:
        """How far it came."""

    def run(self) -> None:
        """Join, work, leave."""
        try:
            self._run()
        finally:
            if self.store is not None:
                self.store.close()

    def _run(self) -> None:
        try:
            self.store = store = GroupStore(self._rendezvous, self._rank, self._deadline)
            self._heed_halt()
            self._communicator = communicator = join(store, self.device, self._deadline)
            self._heed_halt()
            self.work(communicator)
        except BaseException as error:
            self._handover.fail(self._ended_by(error))
        else:
            self._leave(communicator, store)

    def heeding(self, wait: Callable[[float], Answer | None]) -> Answer | None:
        """What ``wait`` (told for how many seconds) gives, or None at the deadline. Meanwhile the group's failure is looked for.

        For any thread of this side.

        Raises:
            GroupError: if the group failed, in the words of the rank that failed first, or the sender is gone, or `halt` was called.
        """
        while True:
            answer = wait(min(_LOOK_S, self._deadline.left_s))
            if answer is not None:
                return answer
            if self._halted:
                raise GroupError(HALTED)
            if (words := self._failure()) is not None:
                if (answer := wait(0)) is not None:  # which raises, if this rank itself knows better what happened
                    return answer
                raise GroupError(words)
            if self._deadline.passed:
                return None

    def _failure(self) -> str | None:
        try:
            return self.store.failure() if self.store is not None else None
        except GroupError as gone:
            return str(gone)

    def give_up(self, error: BaseException) -> None:
        """Tell the others why this side ends, whatever this thread is blocked in, and end it as soon as that can be interrupted."""
        if self.store is not None:
            with contextlib.suppress(GroupError):  # nobody is left to be told
                self.store.fail(_words(error))
        self.halt()

    def halt(self) -> None:
        """End it as soon as the backend can be interrupted. Idempotent."""
        self._halted = True
        self._heed_halt()

    def _heed_halt(self) -> None:
        if self._halted and self.store is not None:
            self.store.halt()
        if self._halted and self._communicator is not None:
            self._communicator.abort()

    def _leave(self, communicator: Communicator, store: GroupStore) -> None:
        try:
            with contextlib.suppress(GroupError):  # the sender has closed the store already: it needs nobody any more
                store.leave()
            if communicator.passes_on or self._rank == SENDER:  # the store ends with the sender
                store.wait_left(FAREWELL_S)
        finally:
            if communicator.passes_on:
                communicator.close()
            else:  # gloo takes some 10 ms for each of the others. Not a daemon: in its C++ the interpreter's end is the process's
                threading.Thread(target=communicator.close, name=f"{self.name}-closing", daemon=False).start()

    def _ended_by(self, error: BaseException) -> BaseException:
        """Tell the others, let go of them, and return what this side is to raise."""
        ours = self._handover.failure
        words, gone = self._told(ours or error)
        if ours is not None:
            return ours
        kind = TimeoutError if isinstance(error, TimeoutError) else GroupError
        ended = kind(f"{words}; {self.progress()}{gone}")
        ended.__cause__ = error
        return ended

    def _told(self, error: BaseException) -> tuple[str, str]:
        """What the group fails for, now that the others know it too, and who of them is not heard of any more."""
        words = _words(error)
        store, communicator = self.store, self._communicator
        gone = ""
        try:
            if store is not None:
                told = store.failure()
                if told is None:  # before the connections close: nobody should have to guess why they did
                    store.fail(words)
                words = told or words
        except GroupError as lost:
            words = str(lost)
        if communicator is not None:
            communicator.close()
        if store is not None:
            with contextlib.suppress(GroupError):  # said already
                store.leave()
                if self._rank == SENDER and (silent := store.silent(FAILED_FAREWELL_S)):
                    gone = f"; nothing more was heard of rank {', '.join(map(str, silent))}"
        return words, gone


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, GroupError | TimeoutError) else words_of(error)
