"""The exception tree. An error's type says what holds now; its fields say who, where and how long.

WeightSyncError                 base of everything this package raises on purpose
+-- ConfigError (ValueError)    an argument is wrong; nothing was sent, no engine was touched
+-- AttachError                 an engine cannot be attached; it was left as found
|   +-- SessionConflict         another session holds these engines
+-- EngineCallError             one or more engines failed a protocol call (wire clients; a round ends in one of the next three)
|   +-- UnsupportedError        an engine's version does not have that call
+-- RoundAborted                the round changed nothing: the old version serves everywhere; the call may be repeated
+-- ReplicasLost                the new version serves on the rest; the named replicas are fenced
+-- FleetTorn                   no replica of this session may serve until healed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_weightsync.report import SyncReport


@dataclass(frozen=True, kw_only=True)
class CallFailure:
    """How one engine failed one call.

    Attributes:
        message: The engine's own words, or ours when it never answered.
        kind: ``"raised"`` (it answered with an error), ``"died"`` (its process is gone),
            ``"unanswered"`` (no answer within the limit; it may still come), ``"out_of_step"`` (its answers belong to earlier calls).
        elapsed_s: Seconds from the call to this verdict.
    """

    message: str
    kind: str
    elapsed_s: float


class WeightSyncError(Exception):
    """Base of this package's errors. The text starts with what holds now, then who, where, how long, and what to do.

    Attributes:
        phase: The phase that failed, such as ``"preflight"`` or ``"update_weights"``.
        replicas: Ids of the replicas it concerns.
        elapsed_s: Seconds spent in the phase, if it is a matter of time.
        limit_s: The deadline that applied, in seconds.
        engine_message: The words of the engine, or of whatever else failed.
        log_hint: Where the engine's log is to be found.
        hint: What to do next.
        report: The round's report as far as it got.
    """

    def __init__(
        self,
        message: str = "",
        *,
        phase: str | None = None,
        replicas: tuple[str, ...] = (),
        elapsed_s: float | None = None,
        limit_s: float | None = None,
        engine_message: str | None = None,
        log_hint: str | None = None,
        hint: str | None = None,
        report: SyncReport | None = None,
    ) -> None:
        self.message = message
        self.phase = phase
        self.replicas = tuple(replicas)
        self.elapsed_s = elapsed_s
        self.limit_s = limit_s
        self.engine_message = engine_message
        self.log_hint = log_hint
        self.hint = hint
        self.report = report
        super().__init__(message)

    def __str__(self) -> str:
        where = []
        if self.replicas:
            where.append(f"replicas: {', '.join(self.replicas)}")
        if self.phase:
            where.append(f"phase: {self.phase}")
        if self.elapsed_s is not None:
            limit = f" of {self.limit_s:.1f} s allowed" if self.limit_s is not None else ""
            where.append(f"after {self.elapsed_s:.1f} s{limit}")
        parts = [self.message, f"[{'; '.join(where)}]" if where else ""]
        if self.engine_message:
            parts.append(f"Cause: {self.engine_message}")
        if self.log_hint:
            parts.append(f"Log: {self.log_hint}")
        if self.hint:
            parts.append(f"What to do: {self.hint}")
        return "\n".join(part for part in parts if part)

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray rebuilds an exception from its pickle; a class with keyword-only arguments would arrive as another type.
        return (_rebuild, (type(self), dict(self.__dict__)))


def _rebuild(cls: type[WeightSyncError], fields: dict[str, Any]) -> WeightSyncError:
    error = cls.__new__(cls)
    Exception.__init__(error, fields.get("message", ""))
    error.__dict__.update(fields)
    return error


class ConfigError(WeightSyncError, ValueError):
    """An argument is wrong. Nothing was sent and no engine was touched."""


class AttachError(WeightSyncError):
    """An engine cannot be attached. It was left as it was found."""


class SessionConflict(AttachError):
    """Another session holds these engines; ``take_over=True`` takes them from it."""


class EngineCallError(WeightSyncError):
    """One or more engines failed a protocol call; every engine had answered or missed the deadline before this was raised.

    Attributes:
        failures: One `CallFailure` per engine that failed, by its label.
        answers: What the engines that did not fail answered, by label.
    """

    def __init__(
        self,
        message: str = "",
        *,
        failures: Mapping[str, CallFailure] | None = None,
        answers: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        self.failures = dict(failures or {})
        self.answers = dict(answers or {})
        super().__init__(message, **fields)


class UnsupportedError(EngineCallError):
    """The engine's version does not have this call. Nothing was sent."""


class RoundAborted(WeightSyncError):
    """The round changed nothing: the old version serves everywhere. The call may be repeated.

    Everywhere but on replicas that were fenced before, which it names. Where a source fails, the sender knows no more than that no engine
    was touched.
    """


class ReplicasLost(WeightSyncError):
    """The new version serves on the rest of the fleet; the named replicas are fenced until healed or replaced."""


class FleetTorn(WeightSyncError):
    """No replica of this session holds complete, attested weights. None may serve until healed."""
