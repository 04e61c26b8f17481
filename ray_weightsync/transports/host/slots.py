"""The life of a slot as pure decisions: which moves are legal, which slot is taken next, which are too many. No file is touched here."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ray_weightsync.transports.host.layout import SlotError


class SlotState(enum.Enum):
    """What the store uses a slot for."""

    FREE = "free"
    """Nobody's; kept for reuse."""
    WRITING = "writing"
    """Given to a writer."""
    SEALED = "sealed"
    """Complete, not committed."""
    COMMITTED = "committed"
    """What the fleet serves and is healed from; never a target of staging."""
    FORMER = "former"
    """Committed before; kept for a roll-back until a staging needs it."""
    RETIRED = "retired"
    """Unlinked; its memory goes with its last map."""


MOVES: dict[SlotState, frozenset[SlotState]] = {
    SlotState.FREE: frozenset({SlotState.WRITING, SlotState.RETIRED}),
    SlotState.WRITING: frozenset({SlotState.SEALED, SlotState.FREE}),
    SlotState.SEALED: frozenset({SlotState.COMMITTED, SlotState.FREE}),
    SlotState.COMMITTED: frozenset({SlotState.FORMER}),
    SlotState.FORMER: frozenset({SlotState.COMMITTED, SlotState.FREE, SlotState.WRITING, SlotState.RETIRED}),
    SlotState.RETIRED: frozenset(),
}
"""The legal moves. A committed slot has to be superseded before anything else can become of it."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One slot.

    Attributes:
        name: Base name of its file.
        num_bytes: Payload bytes, padding included. A slot never changes its size.
        state: What it is used for.
        snapshot: Whose bytes it holds; empty while it is free.
        plan: Digest of their plan; empty while it is free.
        overlap: Whether it may be read while it is written.
        turn: Grows with every move; tells which slot was left alone longest.
    """

    name: str
    num_bytes: int
    state: SlotState = SlotState.FREE
    snapshot: str = ""
    plan: str = ""
    overlap: bool = False
    turn: int = 0

    def moved(self, state: SlotState, turn: int) -> Slot:
        """This slot in another state.

        Raises:
            SlotError: if `MOVES` does not allow it.
        """
        if state not in MOVES[self.state]:
            raise SlotError(f"slot {self.name} is {self.state.value}; it cannot become {state.value}")
        if state in (SlotState.FREE, SlotState.RETIRED):
            return replace(self, state=state, turn=turn, snapshot="", plan="", overlap=False)
        return replace(self, state=state, turn=turn)

    def given(self, *, snapshot: str, plan: str, overlap: bool, turn: int) -> Slot:
        """This spare slot, given to a writer of ``snapshot``."""
        return replace(self.moved(SlotState.WRITING, turn), snapshot=snapshot, plan=plan, overlap=overlap)


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """What a store holds now, and what it did in its life.

    Attributes:
        slots: Files linked now; retired ones are not.
        num_bytes: Their size together, headers included.
        in_use: Slots being written, sealed or committed.
        committed: Id of the committed snapshot.
        allocated: Slots created so far.
        reused: How often a slot was given away again.
        retired: Slots given up so far because somebody still held them when they were needed.
        dropped: Slots given up so far because there were too many, or of another size.
        janitor_pid: Process that unlinks the files should this one be killed.
    """

    slots: int
    num_bytes: int
    in_use: int
    committed: str | None
    allocated: int
    reused: int
    retired: int
    dropped: int
    janitor_pid: int


def spare(slots: Iterable[Slot]) -> list[Slot]:
    """The slots that may be given away, the least missed first: free ones, then former ones, each by how long they were left alone."""
    return sorted(
        (slot for slot in slots if slot.state in (SlotState.FREE, SlotState.FORMER)),
        key=lambda slot: (slot.state is SlotState.FORMER, slot.turn),
    )


def fitting(slots: Iterable[Slot], num_bytes: int) -> list[Slot]:
    """The spare slots of exactly ``num_bytes``, in the order in which to try them.

    One model has one size, so another size means another plan, and slots of the old one are soon `surplus`; a larger slot that
    served a smaller payload would hold on to memory for good.
    """
    return [slot for slot in spare(slots) if slot.num_bytes == num_bytes]


def surplus(slots: Sequence[Slot], num_slots: int) -> list[Slot]:
    """The spare slots to give up so that at most ``num_slots`` remain, as far as spare ones suffice."""
    return spare(slots)[: max(0, len(slots) - num_slots)]
