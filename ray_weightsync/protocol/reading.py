"""How to read what a channel raised: is the engine's process gone, and what did the engine itself say.

Neither Ray nor vLLM is imported: their exceptions are known by the names in their class hierarchy, so that this also works
where a class of the engine's side does not exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ray_weightsync.errors import WeightSyncError

MAX_WORDS = 1000
"""Characters of an engine's message that an error repeats."""

ENGINE_DEAD = "EngineDeadError"
"""vLLM's name for an engine core that will never answer again, though the actor around it still does."""

_GONE = frozenset(("RayActorError", "WorkerCrashedError", "NodeDiedError", "LocalRayletDiedError"))
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_WORKER = re.compile(r"Worker failed with error '(.*)', please check the stack trace above for the root cause", re.DOTALL)
_FRAME = re.compile(r'^\s*File ".*", line \d+')


class ChannelError(Exception):
    """Raised by a channel itself. Its text is for humans and already holds the engine's words."""


class EngineRaised(ChannelError):
    """An exception that an engine raised inside a foreign actor, carried as text: its class may not exist on this side.

    Attributes:
        type_name: Full name of the exception's class.
        names: Names of its class and of that one's bases.
        text: The exception's own text.
        trace: The last lines of its traceback.
    """

    def __init__(self, type_name: str, names: Iterable[str], text: str, trace: str = "") -> None:
        self.type_name = type_name
        self.names = tuple(names)
        self.text = text
        self.trace = trace
        super().__init__(type_name, self.names, text, trace)

    def __str__(self) -> str:
        return _sentence(self.type_name.rpartition(".")[2], self.text)


class EngineRestarted(ChannelError):
    """The process that was carrying out the call is gone; another one answers behind the same handle."""


def died(error: BaseException) -> bool:
    """Whether ``error`` means that the engine's process, or the engine core behind it, is gone.

    True for Ray's ``RayActorError`` family and for vLLM's ``EngineDeadError``. ``ActorUnavailableError`` belongs to the family: Ray
    raises it when a restartable actor's process ended, and also when the network to a living one broke, so compare incarnations
    before such a replica is used again. A refused connection is not death: a server may be starting, or a proxy be down.
    """
    if isinstance(error, EngineRestarted):
        return True
    if isinstance(error, EngineRaised):
        return ENGINE_DEAD in error.names
    names = {cls.__name__ for cls in type(error).__mro__}
    if "RayTaskError" in names:
        # The engine's actor answered; a RayActorError inside is about an actor that *it* called.
        cause = _cause(error)
        return ENGINE_DEAD in names or (cause is not None and ENGINE_DEAD in {cls.__name__ for cls in type(cause).__mro__})
    if "UnserializableException" in names:
        return last_words(str(error)).partition(":")[0].rpartition(".")[2] == ENGINE_DEAD
    return bool(names & _GONE) or ENGINE_DEAD in names


def words(error: BaseException) -> str:
    """The engine's own words in ``error``: its exception's name and message, without traceback, colours or Ray's wrapping."""
    if isinstance(error, ChannelError | WeightSyncError):
        return _short(str(error))
    names = {cls.__name__ for cls in type(error).__mro__}
    if "UnserializableException" in names:
        return _short(last_words(str(error)))
    if "RayTaskError" in names:
        cause = _cause(error)
        if cause is None or cause is error:
            return _short(last_words(str(error)))
        return _short(words(cause))
    if names & _GONE:
        # Ray lists the actor's class, pid and address on indented lines; the label says which engine it is.
        return _short(" ".join(line for line in str(error).splitlines() if line and not line[0].isspace()))
    return _short(_sentence(type(error).__name__, last_words(str(error))))


def last_words(text: str) -> str:
    """What follows the last frame of the last traceback in ``text``; all of it if there is none."""
    lines = _ANSI.sub("", text).strip().splitlines()
    frames = [index for index, line in enumerate(lines) if _FRAME.match(line)]
    if not frames:
        return "\n".join(lines)
    rest = lines[frames[-1] + 1 :]
    while rest and (not rest[0] or rest[0][0].isspace()):
        rest = rest[1:]
    return "\n".join(rest) or lines[-1].strip()


def workers_words(text: str) -> str:
    """The worker's own words in what vLLM's multiprocessing executor makes of them; ``text`` itself if it is nothing of the kind."""
    found = _WORKER.search(text)
    return text if found is None else found[1]


def _cause(error: BaseException) -> Any:
    return getattr(error, "cause", None)


def _sentence(name: str, text: str) -> str:
    if (inner := workers_words(text)) != text:
        return inner
    if not text:
        return name
    return text if text.partition(":")[0].rpartition(".")[2] == name else f"{name}: {text}"


def _short(text: str) -> str:
    return text if len(text) <= MAX_WORDS else f"{text[: MAX_WORDS // 2]} [...] {text[-MAX_WORDS // 2 :]}"
