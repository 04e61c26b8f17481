"""Ranks of a broadcast group: the sender is 0, and every worker of every replica has a rank of its own. Pure.

A vLLM worker finds its rank by ``data_parallel_index * (tensor x pipeline) + rank + rank_offset``
(`vllm.distributed.weight_transfer.nccl_common.worker_init_process_group`). So replicas need different offsets, except the
data-parallel engines of one deployment: their index tells them apart already, and they share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray_weightsync.errors import ConfigError

if TYPE_CHECKING:
    from ray_weightsync.engines.resolve import Engine

SENDER_RANK = 0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What has to be known of a replica to give its workers ranks. None: it did not say.

    Attributes:
        id: The replica's id.
        world_size: Workers of its configuration, tensor x pipeline (x context) x data parallel.
        tensor_parallel_size: For the table only, as is ``pipeline_parallel_size``.
        data_parallel_size: Data-parallel engines: inside this replica, or in its whole deployment where one is named.
        data_parallel_index: Which of them this replica is. One that has all of them inside is 0.
        deployment: Name shared by replicas that are data-parallel engines of one deployment.
    """

    id: str
    world_size: int | None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    data_parallel_index: int | None = None
    deployment: str | None = None


@dataclass(frozen=True)
class Member:
    """A replica's place in the group.

    Attributes:
        id: The replica's id.
        rank_offset: What its workers add to their own rank.
        ranks: The ranks that its workers have then; consecutive.
        parallelism: In words, such as ``"TP 2"``; empty for one worker.
    """

    id: str
    rank_offset: int
    ranks: range
    parallelism: str = ""


@dataclass(frozen=True)
class Group:
    """The sender and every worker. Picklable.

    Attributes:
        members: One per replica, in the order of the fleet.
    """

    members: tuple[Member, ...]

    @property
    def world_size(self) -> int:
        """Ranks in the group, the sender's included."""
        return 1 + sum(len(member.ranks) for member in self.members)

    def member(self, replica: str) -> Member:
        """The place of the replica with that id.

        Raises:
            KeyError: if it is not in the group.
        """
        for member in self.members:
            if member.id == replica:
                return member
        raise KeyError(f"{replica} is not in the group: {self.table()}")

    def init_payload(self, replica: str) -> dict[str, Any]:
        """Where a replica's workers stand: ``rank_offset`` and ``world_size``, as our receiver and `StockFormat.init_info` take them."""
        return {"rank_offset": self.member(replica).rank_offset, "world_size": self.world_size}

    def table(self) -> str:
        """The ranks in one line, such as ``group of 4: 0 sender | 1-2 r0 (TP 2) | 3 r1``."""
        rows = [f"{SENDER_RANK} sender"]
        for member in sorted(self.members, key=lambda each: each.ranks.start):
            first, last = member.ranks[0], member.ranks[-1]
            words = f" ({member.parallelism})" if member.parallelism else ""
            rows.append(f"{first if first == last else f'{first}-{last}'} {member.id}{words}")
        return f"group of {self.world_size}: {' | '.join(rows)}"


def group_of(shapes: Sequence[Shape]) -> Group:
    """The group of the sender and all workers of ``shapes``, in that order: their ranks are 1 to ``world_size - 1``, each one once.

    A deployment stands where its first replica does.

    Raises:
        ConfigError: if there are no replicas, two have one id, a size cannot be seen, or a deployment is not complete or not one.
            It names the replicas and what to set.
    """
    if not shapes:
        raise ConfigError("a group needs at least one replica")
    ids = [shape.id for shape in shapes]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise ConfigError(f"two replicas of the group have the id {', '.join(twice)}", replicas=tuple(twice))
    offset = SENDER_RANK + 1
    members: dict[str, Member] = {}
    for shape in shapes:
        if shape.id in members:
            continue
        if shape.deployment is None:
            workers = span = _alone(shape)
            parts = [shape]
        else:
            parts = [each for each in shapes if each.deployment == shape.deployment]
            workers = _workers_of_each(shape.deployment, parts)
            span = workers * len(parts)
        members.update({part.id: _member(part, offset, workers) for part in parts})
        offset += span
    return Group(tuple(members[name] for name in ids))


def shape_of(engine: Engine) -> Shape:
    """What is known of an engine: it is believed, and what it did not say is taken from its `EngineRef`."""
    facts = engine.facts
    return Shape(
        id=engine.id,
        world_size=engine.world_size,
        tensor_parallel_size=facts.tensor_parallel_size,
        pipeline_parallel_size=facts.pipeline_parallel_size,
        data_parallel_size=facts.data_parallel_size,
        data_parallel_index=facts.data_parallel_index,
        deployment=engine.ref.deployment,
    )


def _alone(shape: Shape) -> int:
    """Workers of a replica that is a deployment of its own."""
    if shape.data_parallel_index:
        raise ConfigError(
            f"{shape.id} is data-parallel engine {shape.data_parallel_index} of a deployment, and it is not said of which",
            replicas=(shape.id,),
            hint="attach all engines of that deployment, each as EngineRef(..., deployment=NAME)",
        )
    return _world_size(shape)


def _workers_of_each(name: str, parts: Sequence[Shape]) -> int:
    """Workers of each engine of a deployment that is here as a whole."""
    ids = tuple(part.id for part in parts)
    where = f"deployment {name!r} ({', '.join(ids)})"
    if unknown := [part.id for part in parts if part.data_parallel_index is None]:
        raise ConfigError(
            f"{where}: the data-parallel index of {', '.join(unknown)} cannot be seen",
            replicas=tuple(unknown),
            hint="attach these engines by their actors or server URLs, which tell it; or, if they are independent, without deployment=",
        )
    by_index: dict[int, str] = {}
    for part in parts:
        index = int(part.data_parallel_index or 0)
        if (first := by_index.setdefault(index, part.id)) != part.id:
            raise ConfigError(
                f"{where}: {first} and {part.id} are both data-parallel engine {index}",
                replicas=(first, part.id),
                hint="engines that are independent of each other are attached without deployment=",
            )
    # A dense model's engines each say size 1, and only their index tells that they are several.
    sizes = {part.id: max(part.data_parallel_size or 1, 1) for part in parts}
    size = max(*sizes.values(), max(by_index) + 1)
    if told := {part: told for part, told in sizes.items() if told not in (1, size)}:
        raise ConfigError(
            f"{where}: {_each(told)} data-parallel engines, others have {size}: they are not one deployment",
            replicas=tuple(told),
            hint="give engines of different deployments different names",
        )
    if missing := sorted(set(range(size)) - by_index.keys()):
        raise ConfigError(
            f"{where} has {size} data-parallel engines, and {', '.join(map(str, missing))} "
            f"{'is' if len(missing) == 1 else 'are'} missing from the fleet: their ranks would stay empty",
            replicas=ids,
            hint="attach all of them; or, if these are independent engines, attach them without deployment=",
        )
    workers = {part.id: _world_size(part) // sizes[part.id] for part in parts}
    if len(set(workers.values())) > 1:
        raise ConfigError(f"{where}: {_each(workers)} workers per engine; in one deployment all have as many", replicas=ids)
    return workers[ids[0]]


def _world_size(shape: Shape) -> int:
    if shape.world_size is None:
        raise ConfigError(
            f"it cannot be seen how many workers {shape.id} has",
            replicas=(shape.id,),
            hint="say it: EngineRef(..., world_size=N), with N = tensor x pipeline x data parallel",
        )
    if shape.world_size < 1 or shape.world_size % (shape.data_parallel_size or 1):
        raise ConfigError(
            f"{shape.id} has {shape.world_size} workers in {shape.data_parallel_size or 1} data-parallel engines, which is not possible",
            replicas=(shape.id,),
            hint="correct EngineRef(world_size=...): N = tensor x pipeline x data parallel",
        )
    return shape.world_size


def _member(shape: Shape, offset: int, workers: int) -> Member:
    first = offset + (shape.data_parallel_index or 0) * workers
    sizes = {"TP": shape.tensor_parallel_size, "PP": shape.pipeline_parallel_size}
    if shape.deployment is None:
        sizes["DP"] = shape.data_parallel_size
    words = [f"{name} {size}" for name, size in sizes.items() if size is not None and size > 1]
    if not words and workers > 1:
        words = [f"{workers} workers"]
    if shape.deployment is not None:
        words.append(f"DP {shape.data_parallel_index} of {shape.deployment}")
    return Member(shape.id, offset, range(first, first + workers), ", ".join(words))


def _each(values: dict[str, int]) -> str:
    return ", ".join(f"{name} has {value}" for name, value in values.items())
