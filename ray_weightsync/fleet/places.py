"""The places of a placement: what an actor is started with there, which are vacant, and where they are after a node was lost."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_weightsync.errors import AttachError, ConfigError
from ray_weightsync.fleet.bundles import ROUNDING, Ask, Located, Seat, seats_after, seats_for
from ray_weightsync.fleet.groups import PHASE, free_by_node, moved_to, nodes_of, remove_groups

logger = logging.getLogger(__name__)

NOTICED_WITHIN_S = 5.0
"""Within this, Ray's view of what is free shows actors that were just started or ended, and a bundle of a lost node is on another one."""

NO_NODE = "its node is gone, and Ray has found no other one for it"
GPUS_TAKEN = "its node is gone, and on the new one trainers had its GPUs before these could be told"
HINTS = {
    NO_NODE: "Ray gives a lost place to the first node that has room: add one, or end something",
    GPUS_TAKEN: "end the trainers there, ask for the engine's place, and start them then",
}

Role = Literal["trainer", "engine"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one trainer or engine belongs, as it was last found. Picklable.

    Attributes:
        role: What it is a place for.
        index: Its number among those; neighbours in number are neighbours in the cluster.
        node_id: Ray's id of the node.
        node_ip: Its address.
        gpu_ids: GPUs of its bundle, as ``CUDA_VISIBLE_DEVICES`` on the node names them. Trainers that share the bundle of an engine have
            one of them each. Empty where the bundle moved to another node and somebody there had them before they could be told.
        group: The placement group.
        bundle_index: Its bundle there.
        num_workers: Worker processes that it has room for; 1 for a trainer.
        num_cpus: CPUs to ask Ray for.
        num_gpus: GPUs to ask Ray for. An engine that shares its GPUs with trainers asks for none and names them in ``env``.
        env: Environment variables that its process needs.
        engine_args: vLLM's engine arguments that it needs there.
    """

    role: Role
    index: int
    node_id: str
    node_ip: str
    gpu_ids: tuple[str, ...]
    group: PlacementGroup
    bundle_index: int
    num_workers: int
    num_cpus: float
    num_gpus: int
    env: Mapping[str, str]
    engine_args: Mapping[str, object]

    def options(self, *, env: Mapping[str, str] | None = None) -> dict[str, Any]:
        """What ``Actor.options(...)`` takes to start it there.

        Where ``env`` has variables, a ``runtime_env`` is among it, which Ray takes in place of the actor class's own.

        Args:
            env: Further environment variables, which win over the place's own.
        """
        options: dict[str, Any] = {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            # What the actor starts itself is not captured: a coordinator or a snapshot store has no share in the bundle.
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.bundle_index),
        }
        if merged := {**self.env, **(env or {})}:
            options["runtime_env"] = {"env_vars": merged}
        return options

    def __str__(self) -> str:
        gpus = f" GPU {','.join(self.gpu_ids)}" if self.gpu_ids else ""
        return f"{self.role} {self.index} node {self.node_id[:8]} ({self.node_ip}){gpus}"


class Placed:
    """Reserved places; a context manager. Made by `ray_weightsync.placement.reserve`. Picklable: a copy is of the same places.

    They are given back by `close`, which ends whatever still runs in them, and by Ray when the job ends. An actor that reserves them and
    dies leaves them until then, unless it is a detached one: close them from outside, or let the job script reserve.

    A place whose node is lost is given another node by Ray, as soon as one has room; `trainer`, `engine` and `vacant_engine` look anew.
    """

    def __init__(self, ask: Ask, groups: Sequence[PlacementGroup], located: Sequence[Located]) -> None:
        self._ask = ask
        self._groups = tuple(groups)
        self._trainers, self._engines = seats_for(ask, located)
        self._lock = threading.RLock()
        self._given: dict[int, float] = {}
        self._closed = False

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    @property
    def trainers(self) -> tuple[Place, ...]:
        """A place for each trainer, by node and GPU as they were when reserved; each as it was last found."""
        return tuple(self._place("trainer", index, seat) for index, seat in enumerate(self._trainers))

    @property
    def engines(self) -> tuple[Place, ...]:
        """A place for each engine, likewise."""
        return tuple(self._place("engine", index, seat) for index, seat in enumerate(self._engines))

    def _place(self, role: Role, index: int, seat: Seat) -> Place:
        where = seat.where
        return Place(
            role=role,
            index=index,
            node_id=where.node_id,
            node_ip=where.node_ip,
            gpu_ids=where.gpu_ids,
            group=self._groups[where.group],
            bundle_index=where.index,
            num_workers=seat.num_workers,
            num_cpus=seat.num_cpus,
            num_gpus=seat.num_gpus,
            env=dict(seat.env),
            engine_args=dict(seat.engine_args),
        )

    def trainer(self, index: int) -> Place:
        """The place of that trainer, where it is now.

        Raises:
            AttachError: if its node is gone, and Ray does not find another one within a few seconds.
            ConfigError: if the places were given back.
        """
        return self._wait_for("trainer", index)

    def engine(self, index: int) -> Place:
        """The place of that engine, where it is now; raises as `trainer` does.

        An engine that shares GPUs with trainers has to be told their ids. So after the loss of their node ask for its place before you
        start trainers there anew; it is an `AttachError`, too, if these have the GPUs already.
        """
        return self._wait_for("engine", index)

    def _wait_for(self, role: Role, index: int) -> Place:
        began = time.monotonic()
        while isinstance(found := self._look(role, index, self._nodes()), str):
            if (waited := time.monotonic() - began) > NOTICED_WITHIN_S or found == GPUS_TAKEN:
                raise AttachError(
                    f"{role} {index} has no place: {found}",
                    phase=PHASE,
                    elapsed_s=waited,
                    limit_s=NOTICED_WITHIN_S,
                    hint=HINTS[found],
                )
            time.sleep(0.1)
        return found

    def _nodes(self) -> dict[tuple[int, int], str]:
        if self._closed:
            raise ConfigError("these places were given back: reserve new ones")
        return nodes_of(self._groups)

    def _look(self, role: Role, index: int, nodes: Mapping[tuple[int, int], str]) -> Place | str:
        """That place, where its bundle is now; or in words why there is none."""
        with self._lock:
            where = self._seats(role)[index].where
            node_id = nodes.get((where.group, where.index))
            if node_id is None:
                return NO_NODE
            # One that shares no GPUs has them from Ray, whether we know them or not.
            must_be_told = role == "engine" and bool(where.bundle.trainers)
            if node_id != where.node_id or (must_be_told and where.lacks_gpus):
                moved = moved_to(node_id, where, self._groups[where.group])
                if moved is None:
                    return NO_NODE
                where = moved
                self._trainers, self._engines = seats_after(self._ask, self._trainers, self._engines, where)
                logger.info("%s %d is on node %s (%s) now", role, index, node_id[:8], where.node_ip)
            if must_be_told and where.lacks_gpus:
                return GPUS_TAKEN
            return self._place(role, index, self._seats(role)[index])

    def _seats(self, role: Role) -> tuple[Seat, ...]:
        return self._trainers if role == "trainer" else self._engines

    def vacant_engine(self) -> Place:
        """A place for an engine in which none is, such as where a lost one was. It is not told again for a few seconds.

        What is free in its bundle tells, so trainers that share bundles with engines have to be there already.

        Raises:
            AttachError: if there is none within those seconds: Ray takes a moment to notice the end of an actor or of a node.
            ConfigError: if the places were given back.
        """
        began = time.monotonic()
        while not isinstance(found := self._take_vacant(), Place):
            if (waited := time.monotonic() - began) > NOTICED_WITHIN_S:
                raise self._none_vacant(found, waited)
            time.sleep(0.1)
        return found

    def _none_vacant(self, lost: Mapping[int, str], waited_s: float) -> AttachError:
        total = len(self._engines)
        said = f"{total - len(lost)} of {total} places for engines are taken" if lost else f"all {total} places for engines are taken"
        return AttachError(
            "; ".join([said, *(f"engine {index}: {why}" for index, why in lost.items())]),
            phase=PHASE,
            elapsed_s=waited_s,
            limit_s=NOTICED_WITHIN_S,
            hint=HINTS[next(iter(lost.values()))] if lost else "reserve more engines than the session starts with, or end one first",
        )

    def _take_vacant(self) -> Place | dict[int, str]:
        """A vacant place; or by number those that nobody can have now, and why."""
        lost: dict[int, str] = {}
        with self._lock:
            now, nodes, free = time.monotonic(), self._nodes(), free_by_node()
            for index, seat in enumerate(self._engines):
                if self._given.get(index, -math.inf) + NOTICED_WITHIN_S >= now:
                    continue
                node_id = nodes.get((seat.where.group, seat.where.index))
                if node_id is None:
                    lost[index] = NO_NODE
                elif _is_empty(self._place("engine", index, seat), free.get(node_id, {})):
                    if isinstance(found := self._look("engine", index, nodes), Place):
                        self._given[index] = now
                        return found
                    lost[index] = found
        return lost

    def __str__(self) -> str:
        return " | ".join(map(str, (*self.trainers, *self.engines)))

    def __enter__(self) -> Placed:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back; actors that still run there are ended. Idempotent."""
        if not self._closed:
            self._closed = True
            remove_groups(self._groups)


def _is_empty(place: Place, free: Mapping[str, float]) -> bool:
    """Whether its bundle has room for what belongs there. Ray calls a bundle's own resources ``<name>_group_<index>_<group>``."""
    bundle = f"group_{place.bundle_index}_{place.group.id.hex()}"
    needs = {"CPU": place.num_cpus, "GPU": place.num_gpus}
    return all(free.get(f"{name}_{bundle}", 0.0) + ROUNDING >= amount for name, amount in needs.items())
