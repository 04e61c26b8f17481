"""What runs in the coordinator's process, through ``__ray_call__``: arming the channels of its replicas.

These functions are imported there, not carried there, so that all calls see one state. They run on a thread beside the
coordinator's event loop, one after the other: none may wait for more than a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ray_weightsync.errors import ConfigError
from ray_weightsync.fleet.states import ReplicaState
from ray_weightsync.testing.interceptor import Armed, Interceptor
from ray_weightsync.testing.spec import FaultSpec
from ray_weightsync.testing.victims import kill_victim, require_victim

if TYPE_CHECKING:
    from ray_weightsync.engines.facts import EngineFacts
    from ray_weightsync.engines.ref import EngineRef
    from ray_weightsync.fleet.replica import Replica

_ATTRIBUTE = "_testing_interceptors"


def engine_of(actor: Any, replica_id: str) -> tuple[EngineRef, EngineFacts]:
    """How the engine of a replica is reached, and what was last learned of it.

    Raises:
        ConfigError: if there is no such replica.
    """
    engine = _replica(actor, replica_id).engine
    return engine.ref, engine.facts


def arm(actor: Any, fault_id: str, spec: FaultSpec) -> None:
    """Arm one fault.

    Raises:
        ConfigError: if there is no such replica, or it does not say which process is to be ended.
    """
    replica = _replica(actor, spec.replica)
    if spec.kind == "kill":
        require_victim(spec, replica.engine.facts)
    for each in _replicas(actor).values():  # all of them: each has to know whether an update is under way when its turn comes
        _interceptor(actor, each)
    _interceptor(actor, replica).armed.append(Armed(fault_id, spec))


def struck(actor: Any, fault_id: str, wait_s: float) -> tuple[int, bool]:
    """How often a fault struck, and whether its place was reached; waits for that for up to ``wait_s`` seconds.

    Raises:
        LookupError: if this process knows nothing of it, as a coordinator that was restarted does not.
    """
    fault = _fault(actor, fault_id)
    reached = fault.reached.wait(wait_s)
    return fault.struck, reached


def release(actor: Any, fault_id: str) -> None:
    """Let go what a fault holds; what it would hold later is not held.

    Raises:
        LookupError: as of `struck`.
    """
    _fault(actor, fault_id).release()


def disarm(actor: Any, fault_ids: Sequence[str]) -> None:
    """Take faults out and let go what they hold. Unknown ones are none."""
    interceptors: dict[str, Interceptor] = vars(actor).get(_ATTRIBUTE, {})
    for interceptor in interceptors.values():
        for fault in [each for each in interceptor.armed if each.id in fault_ids]:
            interceptor.armed.remove(fault)
            fault.release()
    if not any(interceptor.armed for interceptor in interceptors.values()):
        for interceptor in interceptors.values():
            interceptor.remove()
        interceptors.clear()


def _replicas(actor: Any) -> dict[str, Replica]:
    replicas: dict[str, Replica] = actor._coordinator._roster.replicas
    return dict(replicas)


def _replica(actor: Any, replica_id: str) -> Replica:
    replicas = _replicas(actor)
    if replica_id not in replicas:
        raise ConfigError(f"there is no replica {replica_id!r}; this session has {', '.join(replicas)}")
    return replicas[replica_id]


def _interceptor(actor: Any, replica: Replica) -> Interceptor:
    interceptors: dict[str, Interceptor] = vars(actor).setdefault(_ATTRIBUTE, {})
    found = interceptors.get(replica.id)
    if found is None or found.channel is not replica.engine.channel:

        async def kill(spec: FaultSpec) -> None:
            await kill_victim(spec, replica.engine.facts)

        fresh = Interceptor(replica.engine.channel, kill, started=replica.state is ReplicaState.UPDATING)
        if found is not None:  # the replica has another engine now
            found.remove()
            fresh.armed = found.armed
        interceptors[replica.id] = found = fresh
    return found


def _fault(actor: Any, fault_id: str) -> Armed:
    interceptors: dict[str, Interceptor] = vars(actor).get(_ATTRIBUTE, {})
    for interceptor in interceptors.values():
        for fault in interceptor.armed:
            if fault.id == fault_id:
                return fault
    raise LookupError(f"this process knows no fault {fault_id}")
