"""What Ray's control plane remembers: small values that outlive every process of ours, and who is dead.

The only module that uses Ray's internal key-value store and its tables of jobs and actors: not public, both have been there for years
(Ray's own libraries stand on them), and no public call tells that a driver is gone without the dashboard. Measured on Ray 2.60: a call
takes 1 ms; a driver that was killed with SIGKILL counts as dead within 20 ms.

All of it blocks for a trip to the control plane; on an event loop use a thread.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from ray_weightsync.errors import ConfigError
from ray_weightsync.protocol.threads import in_daemon_thread

logger = logging.getLogger(__name__)

GONE_POLL_S = 1.0
"""How often a process is looked for, in seconds."""

NAMESPACE = "ray_weightsync"
"""Ray namespace of all actors of ours; always passed explicitly, since an engine's own executor may connect to Ray elsewhere."""

_NAMESPACE = NAMESPACE.encode()


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process that may die: a driver, or an actor. Of a task only its driver is known.

    Attributes:
        job_id: Hex id of the job that it belongs to.
        actor_id: Hex id of the actor that it is, if it is one.
    """

    job_id: str
    actor_id: str | None = None

    @classmethod
    def this(cls) -> Process:
        """The one that calls."""
        import ray

        context = ray.get_runtime_context()
        return cls(job_id=context.get_job_id(), actor_id=context.get_actor_id())

    @property
    def is_gone(self) -> bool:
        """Whether it will never act again. An actor that Ray is about to restart is not gone."""
        from ray._private.state import state

        if self.actor_id is not None:
            actor: dict[str, Any] | None = state.actor_table(self.actor_id)
            return not actor or actor["State"] == "DEAD"
        jobs = {job["JobID"]: bool(job["IsDead"]) for job in state.job_table()}  # type: ignore[no-untyped-call]
        return jobs.get(self.job_id, True)


def require_ray() -> None:
    """Raise `ConfigError` unless this process is connected to Ray: a call would start a cluster of its own."""
    import ray

    if not ray.is_initialized():
        raise ConfigError("Ray is not initialised in this process; call ray.init() first")


async def until_gone(process: Process) -> None:
    """Return within about a second of the end of ``process``, and not before. Has no limit: cancel it."""
    unknown = ""
    while True:
        await asyncio.sleep(GONE_POLL_S)
        try:
            if await in_daemon_thread(lambda: process.is_gone):
                return
        except Exception as error:  # a process that cannot be asked about is not known to be dead
            if str(error) != unknown:
                unknown = str(error)
                logger.warning("whether %s lives cannot be found out: %s: %s", process, type(error).__name__, error)


def put(key: str, value: bytes) -> None:
    """Keep ``value``, in place of what was there."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(key, value, overwrite=True, namespace=_NAMESPACE)


def put_if_absent(key: str, value: bytes) -> bool:
    """Keep ``value`` unless there is one already; whether it was kept. Atomic."""
    from ray.experimental import internal_kv

    return not internal_kv._internal_kv_put(key, value, overwrite=False, namespace=_NAMESPACE)


def get(key: str) -> bytes | None:
    """What is kept under ``key``."""
    from ray.experimental import internal_kv

    value: bytes | None = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
    return value


def delete(key: str) -> None:
    """Forget it, if it is there."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(key, namespace=_NAMESPACE)


def keys(prefix: str) -> list[str]:
    """The keys that begin with ``prefix``."""
    from ray.experimental import internal_kv

    return [key.decode() for key in internal_kv._internal_kv_list(prefix, namespace=_NAMESPACE)]
