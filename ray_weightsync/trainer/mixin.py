"""Trainer actors that a session drives from the job script."""

from __future__ import annotations

from typing import Any

from ray.actor import ActorHandle

from ray_weightsync.errors import ConfigError, RoundAborted, WeightSyncError
from ray_weightsync.fleet.link import CoordinatorLink
from ray_weightsync.fleet.turns import Busy
from ray_weightsync.fleet.values import Settings
from ray_weightsync.report import SyncReport
from ray_weightsync.trainer.sender import SnapshotSender
from ray_weightsync.trainer.staged import StagedWeights


class TrainerMixin:
    """For trainer actor classes: define `weight_source`, and the session may ask the actor to send.

    A call waits for its turn behind the actor's other methods, so what is sent is the state between two of them.
    """

    def weight_source(self) -> Any:
        """The weights to send: a module, a state dict or a `WeightSource`. Asked once a round."""
        raise ConfigError(f"{type(self).__name__} must define weight_source()")

    def rws_send_weights(
        self, session: str, coordinator: ActorHandle[Any], settings: Settings, version: int | str, busy: Busy
    ) -> SyncReport:
        """Called by the session: send what `weight_source` returns."""
        return self._rws_sender(session, coordinator, settings).send(self._rws_source(), version=version, busy=busy)

    def rws_stage_weights(
        self, session: str, coordinator: ActorHandle[Any], settings: Settings, version: int | str, busy: Busy
    ) -> StagedWeights:
        """Called by the session: stage what `weight_source` returns."""
        return self._rws_sender(session, coordinator, settings).stage(self._rws_source(), version=version, busy=busy)

    def rws_close(self, session: str) -> None:
        """Called by the session when it closes: unmap its slots."""
        if (known := self.__dict__.get("_rws_senders", {}).pop(session, None)) is not None:
            known[1].close()

    def _rws_source(self) -> Any:
        try:
            return self.weight_source()
        except WeightSyncError:
            raise
        except Exception as error:
            raise RoundAborted(
                f"Nothing changed: no engine was touched. {type(self).__name__}.weight_source() failed.",
                phase="stage",
                engine_message=f"{type(error).__name__}: {error}",
                hint="mend it and call again",
            ) from error

    def _rws_sender(self, session: str, coordinator: ActorHandle[Any], settings: Settings) -> SnapshotSender:
        senders: dict[str, tuple[object, SnapshotSender]] = self.__dict__.setdefault("_rws_senders", {})
        made_for = coordinator, settings
        # An earlier session of this name, whose driver was killed, never said that it is over.
        if session in senders and senders[session][0] != made_for:
            self.rws_close(session)
        if session not in senders:
            link = CoordinatorLink(session, coordinator, timeouts=settings.timeouts)
            senders[session] = made_for, SnapshotSender(session, link, settings=settings)
        return senders[session][1]
