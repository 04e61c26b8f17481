"""The front door: `WeightSync` attaches to engines (or spawns them) and sends weights to them.

It holds no state of a round; that is the coordinator's. What it owns, it frees in `close`: the coordinator, its snapshot stores,
and the engines it spawned itself. Engines it attached to are left running.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import ray
from ray.actor import ActorHandle

from ray_weightsync.config import (
    AdoptPolicy,
    Auto,
    CachePolicy,
    FailurePolicy,
    PauseMode,
    PreflightMode,
    Timeouts,
    Transport,
    require_choice,
)
from ray_weightsync.engines.ref import EngineLike, as_refs
from ray_weightsync.errors import ConfigError
from ray_weightsync.fleet.actor import session_name, start_coordinator
from ray_weightsync.fleet.cluster import require_ray
from ray_weightsync.fleet.keyring import Keys, by_reference
from ray_weightsync.fleet.link import CoordinatorLink
from ray_weightsync.fleet.turns import Busy
from ray_weightsync.fleet.values import Settings
from ray_weightsync.follower import Follower, nothing_known
from ray_weightsync.probing import Probe, probed, require_probe
from ray_weightsync.replacer import EngineFactory, Replacer, require_factory
from ray_weightsync.report import FleetStatus, ReplicaStatus, SyncReport
from ray_weightsync.session_life import FleetLife
from ray_weightsync.session_options import EngineSpec, attach_s, given, require_trainers, settings_of
from ray_weightsync.trainer.driving import through_trainer
from ray_weightsync.trainer.sender import SnapshotSender
from ray_weightsync.trainer.staged import StagedWeights
from ray_weightsync.view import FleetView
from ray_weightsync.weights.sources import SourceLike

logger = logging.getLogger(__name__)


class WeightSync(FleetLife):
    """One session: a fleet of engines that follow one trainer's weights.

    Made by `attach` or `spawn`; a context manager.

    Attributes:
        name: The session's name; a `WeightSender` in another process joins by it.
        coordinator: Handle of the coordinator actor; another one after it was lost and succeeded.
    """

    name: str

    def __init__(
        self,
        *,
        name: str,
        coordinator: ActorHandle[Any],
        engines: Mapping[str, Any],
        trainers: Sequence[ActorHandle[Any]],
        settings: Settings,
        engine_factory: EngineFactory | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self._link = CoordinatorLink(name, coordinator, timeouts=settings.timeouts)
        self._trainers = tuple(trainers)
        self._settings = settings
        attempts, retry_s = max(1, settings.on_failure.max_heals), settings.timeouts.health_interval_s
        self._replacer = Replacer(self, engine_factory, owns_made=False, max_attempts=attempts, retry_s=retry_s)
        self._follower = Follower(self._link, nothing_known(name), timeouts=settings.timeouts, logs_changes=True)
        self._sender: SnapshotSender | None = None
        self._keys: Keys = ()
        self._targets = dict(engines)
        self._closed = self._ended = False

    @property
    def engines(self) -> tuple[Any, ...]:
        """The engines as they were given, or made, in the order of joining; without those that were removed or replaced."""
        return tuple(self._targets.values())

    @property
    def coordinator(self) -> ActorHandle[Any]:
        """The coordinator that answered last."""
        return self._link.handle

    @classmethod
    def attach(
        cls,
        engines: Sequence[EngineLike],
        *,
        trainers: Sequence[ActorHandle[Any]] = (),
        name: str | None = None,
        transport: Transport | Auto | str = "auto",
        pause: PauseMode = "keep",
        cache: CachePolicy = "recompute",
        preflight: PreflightMode = "structural",
        adopt: AdoptPolicy = "reported",
        on_failure: FailurePolicy | None = None,
        timeouts: Timeouts | None = None,
        engine_factory: EngineFactory | None = None,
        take_over: bool = False,
    ) -> WeightSync:
        """Attach to engines that run already. They are asked, not changed.

        Args:
            engines: Actor handles, actor names, URLs, `EngineRef`s or wire clients.
            trainers: At most one trainer actor with `TrainerMixin`; without one, this process sends.
            name: The session's name; a fresh one by default.
            transport: ``"auto"`` (each round chooses, by where weights and workers are, and its report says why), ``"host"``,
                ``"collective"``, ``"native:<backend>"``, an `Auto`, a `Host`, a `Collective` or a `Native`.
            pause: What a round does to requests in flight: ``"keep"`` freezes them, ``"wait"`` lets them end, ``"abort"`` ends them.
            cache: What becomes of KV computed with the old weights: ``"recompute"`` drops it, ``"keep"`` keeps it,
                ``"salt"`` leaves it to requests salted with `FleetView.cache_salt`.
            preflight: ``"structural"``: every plan is judged on a meta twin of the model before anything changes.
            adopt: ``"reported"``: engines that agree on a version and run count as serving it, unattested; ``"never"``: none does.
            on_failure: What happens to replicas that fail after *start*.
            timeouts: The deadlines.
            engine_factory: Makes one more engine. It is called in this process, on a thread, when a replica was lost (its process is gone,
                or it could not be healed), and by `add`. What it makes is yours: it goes on when the session ends.
            take_over: Take engines that another session has, after its round in progress, out of its fleet; and flush a weight update
                that another client left open.

        Raises:
            ConfigError: for a wrong argument.
            AttachError: if an engine cannot be attached; all were left as found.
            SessionConflict: if a session of that name is running, or another one has some of these engines and does not let go of them.
        """
        refs = as_refs(engines)
        settings = settings_of(
            transport=transport, pause=pause, cache=cache, preflight=preflight, adopt=adopt, on_failure=on_failure, timeouts=timeouts
        )
        require_trainers(trainers)
        require_factory(engine_factory)
        require_choice("take_over", take_over, (True, False))
        require_ray()
        chosen = session_name(name)
        keys = by_reference(refs)
        coordinator = start_coordinator(chosen, settings)
        session = cls(
            name=chosen,
            coordinator=coordinator,
            engines={str(ref.id): ref.target for ref in refs},
            trainers=trainers,
            settings=settings,
            engine_factory=engine_factory,
        )
        session._keys = keys
        try:
            limit_s, turns = attach_s(settings.timeouts), int(take_over)
            status: FleetStatus = session._link.ask("attach", refs, take_over, keys, limit_s=limit_s, turns=turns)
        except BaseException:
            session.close()
            raise
        logger.info("attached %s", status)
        session._follower.subscribe(lambda news: session._replacer.on_status(news))
        session._follower.begin(status)
        return session

    @classmethod
    def spawn(cls, spec: EngineSpec, **options: Any) -> WeightSync:
        """Start engines and attach to them; they end with the session, and each with its replica.

        Args:
            spec: A `TorchEngineSpec` or `VLLMEngineSpec`. Its ``create`` is the ``engine_factory``, unless another one is given.
            options: Keyword arguments of `attach`.
        """
        if isinstance(spec, type) or not callable(getattr(spec, "spawn", None)):
            given_instead = f"the class {spec.__name__}" if isinstance(spec, type) else type(spec).__name__
            raise ConfigError(f"spawn takes a TorchEngineSpec or a VLLMEngineSpec, not {given_instead}")
        # Before anything is started: an option that attach would refuse should not cost the start of the engines.
        inspect.signature(cls.attach).bind([], **options)
        chosen = {name: value for name, value in options.items() if name not in ("trainers", "name", "engine_factory", "take_over")}
        timeouts = settings_of(**chosen).timeouts
        require_trainers(options.get("trainers", ()))
        require_factory(options.get("engine_factory"))
        require_choice("take_over", options.get("take_over", False), (True, False))
        session_name(options.get("name"))
        require_ray()
        handles = spec.spawn(limit_s=timeouts.heal_s)
        try:
            session = cls.attach(handles, **options)
        except BaseException:
            for handle in handles:
                ray.kill(handle)
            raise
        ids = [replica.id for replica in session._follower.status.replicas]
        session._replacer.own(dict(zip(ids, handles, strict=True)), spec if options.get("engine_factory") is None else None)
        return session

    # --- sending ------------------------------------------------------------------------------------------------------------

    def send_weights(
        self,
        source: SourceLike | None = None,
        *,
        version: int | str,
        probe: Probe | None = None,
        busy: Busy = "wait",
    ) -> SyncReport:
        """Bring every serving replica to ``version``, or say in the type of the error what holds now.

        Args:
            source: A module, a state dict or a `WeightSource`; None when a trainer actor was attached.
            version: Unique within the session. The same version with the same bytes is a repeat and does nothing.
            probe: Called with each engine that was committed (as it was attached, or spawned), on a thread of this process, after it was
                resumed; within ``attest_s``. From one that it does not answer something true for, the version is taken back: it is fenced.
            busy: ``"wait"`` for a round in progress, or ``"raise"``.

        Raises:
            ConfigError: for a wrong argument, or a source that is not what it declares.
            RoundAborted: nothing changed; the old version serves everywhere.
            ReplicasLost: the new version serves on the rest; the lost ones are fenced.
            FleetTorn: no replica may serve until a complete round.
            SessionConflict: another session has taken all engines; nothing was sent.
        """
        if self._trainers:
            return self._probed(probe, lambda: self._through_trainer("send", source, version, busy))
        return self._probed(probe, lambda: self._any_sender().send(given(source), version=version, busy=busy))

    async def asend_weights(
        self,
        source: SourceLike | None = None,
        *,
        version: int | str,
        probe: Probe | None = None,
        busy: Busy = "wait",
    ) -> SyncReport:
        """`send_weights` for callers on an event loop; the work is done on a thread."""
        return await asyncio.to_thread(self.send_weights, source, version=version, probe=probe, busy=busy)

    def stage_weights(
        self,
        source: SourceLike | None = None,
        *,
        version: int | str,
        busy: Busy = "wait",
    ) -> StagedWeights:
        """Seal a snapshot of the weights as they are now; when this returns, the trainer may go on. No engine is paused.

        Raises:
            ConfigError, RoundAborted, FleetTorn: as of `send_weights`.
        """
        if self._trainers:
            staged: StagedWeights = self._through_trainer("stage", source, version, busy)
            return staged
        return self._any_sender().stage(given(source), version=version, busy=busy)

    def commit_weights(self, staged: StagedWeights, *, probe: Probe | None = None) -> SyncReport:
        """Bring every serving replica to staged weights. Probe and errors as of `send_weights`."""
        return self._probed(probe, lambda: self._any_sender().commit(staged))

    def _probed(self, probe: Probe | None, act: Callable[[], SyncReport]) -> SyncReport:
        require_probe(probe)
        timeouts = self._settings.timeouts

        def refuse(report: SyncReport, said: dict[str, str]) -> SyncReport:
            limit_s = 2 * timeouts.resume_s + timeouts.status_s  # and another sender's round
            amended: SyncReport = self._link.ask("refuse", report, said, limit_s=limit_s, turns=1)
            return amended

        return probed(act, probe, self._targets, refuse=refuse, limit_s=timeouts.attest_s)

    def _any_sender(self) -> SnapshotSender:
        self._require_open()
        if self._sender is None:
            self._sender = SnapshotSender(self.name, self._link, settings=self._settings)
        return self._sender

    def _through_trainer(self, what: str, source: object, version: int | str, busy: Busy) -> Any:
        self._require_open()
        if source is not None:
            raise ConfigError("this session sends what its trainer actor's weight_source() returns; do not pass a source")
        return through_trainer(self._trainers[0], what, self._link, self._settings, version, busy)

    # --- looking ------------------------------------------------------------------------------------------------------------

    def status(self) -> FleetStatus:
        """What the coordinator knows, at once, also during a round; no engine is asked."""
        self._require_open()
        status: FleetStatus = self._link.ask("status", limit_s=self._settings.timeouts.status_s)
        return status

    def serving(self) -> tuple[ReplicaStatus, ...]:
        """The replicas that a router may send requests to."""
        return tuple(replica for replica in self.status().replicas if replica.serving)

    def view(self) -> FleetView:
        """A local, picklable view of the fleet for routers and rollout workers."""
        self._require_open()
        return FleetView(self._follower)

    # --- ends ---------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the session and free what it owns. Engines that were attached go on with the weights they have. Idempotent.

        A round in progress is waited for, as long as it may take.
        """
        if self._ended:
            return
        self._closed = True
        self._follower.close()
        if self._sender is not None:
            self._sender.close()
        if not self._link.connected:
            self._ended = True
            return  # the cluster went first, and everything of ours on it
        timeouts = self._settings.timeouts
        try:
            for trainer in self._trainers:
                trainer.rws_close.remote(self.name)
            self._link.end(limit_s=timeouts.commit_s + 2 * timeouts.resume_s)
            self._ended = True  # not where it was interrupted: called again, it goes on
        finally:
            self._replacer.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError(f"session {self.name} is closed")
        self._link.require_connected()

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a WeightSync stays in its process: give other processes sync.view(), or let a trainer join by WeightSender(name)")

    def __repr__(self) -> str:
        return f"WeightSync(name={self.name!r}, engines={len(self.engines)}{', closed' if self._closed else ''})"
