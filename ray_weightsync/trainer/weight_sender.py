"""A trainer that is a process of its own, beside the one that began the session."""

from __future__ import annotations

from ray_weightsync.config import Timeouts
from ray_weightsync.errors import ConfigError
from ray_weightsync.fleet.actor import revive
from ray_weightsync.fleet.cluster import require_ray
from ray_weightsync.fleet.link import CoordinatorLink
from ray_weightsync.fleet.turns import Busy
from ray_weightsync.fleet.values import Settings
from ray_weightsync.report import SyncReport
from ray_weightsync.trainer.sender import SnapshotSender
from ray_weightsync.trainer.staged import StagedWeights
from ray_weightsync.weights.sources import SourceLike, as_source


class WeightSender:
    """A trainer that is a rank of its own: it joins a running session by name and sends from its own process.

    Args:
        name: The session's name.
        source: A module, a state dict or a `WeightSource`.
        rank: This trainer's rank; rank 0 sends.
        world_size: Number of trainer ranks.
        process_group: The ranks' CPU process group, when there are several.

    Raises:
        ConfigError: for a rank outside ``0 .. world_size - 1``, or more than one rank (not available in this version), or if Ray is not
            initialised.
        AttachError: if no session of that name is running.
    """

    def __init__(
        self,
        name: str,
        source: SourceLike,
        *,
        rank: int = 0,
        world_size: int = 1,
        process_group: object | None = None,
    ) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or isinstance(world_size, bool) or not isinstance(world_size, int):
            raise ConfigError(f"rank and world_size must be ints, not {rank!r} and {world_size!r}")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must be in 0 .. world_size - 1 = {world_size - 1}, not {rank}")
        if world_size != 1 or process_group is not None:
            raise ConfigError("a WeightSender of more than one rank is not available in this version: gather on rank 0 and send from there")
        self._source = as_source(source)
        require_ray()
        coordinator = revive(name)
        settings: Settings = CoordinatorLink(name, coordinator, timeouts=Timeouts()).ask("settings", limit_s=Timeouts().connect_s)
        self._link = CoordinatorLink(name, coordinator, timeouts=settings.timeouts)
        self._sender = SnapshotSender(name, self._link, settings=settings)

    def send_weights(self, *, version: int | str, busy: Busy = "wait") -> SyncReport:
        """Bring every serving replica to ``version``. Errors as of `WeightSync.send_weights`."""
        self._link.require_connected()
        return self._sender.send(self._source, version=version, busy=busy)

    def stage_weights(self, *, version: int | str, busy: Busy = "wait") -> StagedWeights:
        """Seal a snapshot of the weights as they are now; the trainer may then go on."""
        self._link.require_connected()
        return self._sender.stage(self._source, version=version, busy=busy)

    def commit_weights(self, staged: StagedWeights) -> SyncReport:
        """Bring every serving replica to staged weights."""
        return self._sender.commit(staged)

    def close(self) -> None:
        """Let go of shared memory. The session goes on. Idempotent."""
        self._sender.close()

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
