"""Several calls of one engine as one: each begins when the one before has answered, and the first that raises ends it.

Where an engine's actor can carry them out itself, they cost one trip and nothing can come in between. They are given the engine's
incarnation: a process that Ray started in its place must not be told what was meant for the one before.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Step = tuple[str, tuple[Any, ...], Mapping[str, Any]]
"""One call of a chain: verb, positional arguments, keyword arguments."""


@dataclass(frozen=True, kw_only=True)
class ChainOutcome:
    """What came of a chain of calls.

    Attributes:
        answers: Answers of the steps that succeeded, in order.
        failed_step: Index of the step that raised; later ones were not run. None if all succeeded.
        error: What that step raised.
        seconds: What each step took where it was carried out, the failed one included.
    """

    answers: tuple[Any, ...] = ()
    failed_step: int | None = None
    error: BaseException | None = None
    seconds: tuple[float, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where a chain is.

    Attributes:
        step: Index of the step under way.
        seconds: For how long it has been.
    """

    step: int
    seconds: float


@dataclass
class _Course:
    step: int = 0
    began: float = 0.0
    halted: bool = False


class StepByStep:
    """A chain for channels to which each step is a call of its own. What they know of its course they know here."""

    call: Callable[..., Awaitable[Any]]

    async def call_chain(self, token: str, steps: Sequence[Step], *, incarnation: str | None = None) -> ChainOutcome:
        """See `Channel.call_chain`."""
        answers: list[Any] = []
        seconds: list[float] = []
        course = self._courses()[token] = _Course(began=time.monotonic())
        try:
            if incarnation is not None:
                await self.require_incarnation(incarnation)
            for index, (verb, args, kwargs) in enumerate(steps):
                course.step, course.began = index, time.monotonic()
                try:
                    if course.halted:
                        raise TimeoutError("not begun: the step before it took too long")
                    answers.append(await self.call(verb, *args, **kwargs))
                except Exception as error:
                    seconds.append(time.monotonic() - course.began)
                    return ChainOutcome(answers=tuple(answers), failed_step=index, error=error, seconds=tuple(seconds))
                seconds.append(time.monotonic() - course.began)
            if incarnation is not None:
                # Another process may have come between two calls; what it was told proves nothing of the one before.
                await self.require_incarnation(incarnation)
        finally:
            del self._courses()[token]
        return ChainOutcome(answers=tuple(answers), seconds=tuple(seconds))

    async def halt_chain(self, token: str, limits_s: Sequence[float]) -> Place | None:
        """See `Channel.halt_chain`."""
        course = self._courses().get(token)
        if course is None:
            return None
        place = Place(course.step, time.monotonic() - course.began)
        if place.seconds >= limits_s[place.step]:
            course.halted = True
        return place

    async def halt_chains(self) -> int:
        """See `Channel.halt_chains`."""
        for course in self._courses().values():
            course.halted = True
        return len(self._courses())

    def _courses(self) -> dict[str, _Course]:
        courses: dict[str, _Course] = self.__dict__.setdefault("_rws_courses", {})
        return courses

    async def require_incarnation(self, incarnation: str) -> None:
        """Raise `EngineRestarted` if another incarnation answers now. Does nothing where that cannot be told."""
