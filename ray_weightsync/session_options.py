"""What a session is attached or spawned with: checked before anything is started."""

from __future__ import annotations

from typing import Any, Protocol

from ray.actor import ActorHandle

from ray_weightsync.config import (
    AdoptPolicy,
    Auto,
    CachePolicy,
    Collective,
    FailurePolicy,
    Native,
    PauseMode,
    PreflightMode,
    Timeouts,
    Transport,
    as_transport,
    require_choice,
)
from ray_weightsync.engines.ref import is_handle
from ray_weightsync.errors import ConfigError
from ray_weightsync.fleet.values import Settings
from ray_weightsync.weights.sources import SourceLike


class EngineSpec(Protocol):
    """What `WeightSync.spawn` takes: `TorchEngineSpec`, `VLLMEngineSpec`, or your own."""

    def spawn(self, *, limit_s: float) -> list[ActorHandle[Any]]:
        """Start the engines and return their handles when all are ready; on failure, end those already started."""
        ...


def settings_of(
    *,
    transport: Transport | Auto | str = "auto",
    pause: PauseMode = "keep",
    cache: CachePolicy = "recompute",
    preflight: PreflightMode = "structural",
    adopt: AdoptPolicy = "reported",
    on_failure: FailurePolicy | None = None,
    timeouts: Timeouts | None = None,
) -> Settings:
    """The options of `WeightSync.attach`, validated."""
    require_choice("pause", pause, ("keep", "wait", "abort"))
    require_choice("cache", cache, ("recompute", "keep", "salt"))
    require_choice("preflight", preflight, ("structural",))
    require_choice("adopt", adopt, ("reported", "never"))
    policy = on_failure if on_failure is not None else FailurePolicy()
    deadlines = timeouts if timeouts is not None else Timeouts()
    for name, value, kind in (("on_failure", policy, FailurePolicy), ("timeouts", deadlines, Timeouts)):
        if not isinstance(value, kind):
            raise ConfigError(f"{name} must be a {kind.__name__}, not {value!r}")
    chosen = as_transport(transport)
    if policy.after_start == "all_or_none" and (
        isinstance(chosen, Native) or (isinstance(chosen, Collective) and not chosen.keep_snapshot)
    ):
        raise ConfigError("after_start='all_or_none' goes back to the version before: that needs Collective(keep_snapshot=True), or 'host'")
    return Settings(
        transport=chosen,
        transport_reason="asked for",
        pause=pause,
        cache=cache,
        adopt=adopt,
        on_failure=policy,
        timeouts=deadlines,
    )


def attach_s(timeouts: Timeouts) -> float:
    """The longest that attaching may take: starting, resolving, claiming; without another session's round."""
    return timeouts.connect_s + 4 * timeouts.attach_s + timeouts.preflight_s


def require_trainers(trainers: object) -> None:
    if not isinstance(trainers, list | tuple):
        raise ConfigError(f"trainers must be a list of actor handles, not {type(trainers).__name__}")
    if len(trainers) > 1:
        raise ConfigError(f"{len(trainers)} trainers given; this version takes one (gather there) or none (this process sends)")
    for trainer in trainers:
        if not is_handle(trainer):
            raise ConfigError(f"trainers must hold actor handles (Trainer.remote(...)), not {type(trainer).__name__}")
        if not hasattr(trainer, "rws_send_weights"):
            raise ConfigError(f"{trainer!r} is no trainer: its class lacks TrainerMixin")


def given(source: SourceLike | None) -> SourceLike:
    if source is None:
        raise ConfigError("send_weights needs a source: a module, a state dict or a WeightSource (or attach(..., trainers=[actor]))")
    return source
