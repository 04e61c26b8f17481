"""The store behind a Ray handle: typed errors, snapshots across processes, and nothing left however it ends."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from ray_weightsync.transports.host.actor import Keepers
from ray_weightsync.transports.host.actor import start_store as start_store_async
from ray_weightsync.transports.host.layout import NoRoomError, SlotError
from ray_weightsync.transports.host.receiver import HostReceiver
from ray_weightsync.transports.host.slots import StoreStats
from ray_weightsync.transports.host.writer import SlotWriter
from ray_weightsync.weights.plan import ParamMeta, Plan

LIMIT_S = 60.0


def start_store(node_id: str, **options: Any) -> Any:
    return asyncio.run(start_store_async(node_id, **options))


WEIGHTS = {"w": torch.arange(1000, dtype=torch.float32), "b": torch.ones(3, dtype=torch.bfloat16)}
PLAN = Plan.from_metadata(ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in WEIGHTS.items())


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=LIMIT_S)


def wait_gone(pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ready, _, _ = select.select([pidfd], [], [], LIMIT_S)
        assert ready, f"process {pid} is still there after {LIMIT_S} s"
    finally:
        os.close(pidfd)


@pytest.fixture
def node_id(ray_cluster: str) -> str:
    return str(ray.get_runtime_context().get_node_id())


@pytest.fixture
def directory() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="rws-tests-", dir="/dev/shm")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def store(node_id: str, directory: str) -> Iterator[Any]:
    handle = start_store(node_id, session=uuid.uuid4().hex[:16], directory=directory, num_slots=2, limit_s=LIMIT_S)
    yield handle
    ray.kill(handle)


def stage(store: Any, writer: SlotWriter, weights: dict[str, torch.Tensor]) -> str:
    snapshot = uuid.uuid4().hex
    address = get(store.open_slot.remote(snapshot, PLAN.digest, PLAN.num_bytes, False))
    packed = writer.write(address, PLAN, iter(weights.items()), progress_bytes=4096)
    get(store.seal.remote(snapshot, packed.digest))
    return snapshot


@ray.remote(num_cpus=0, max_retries=0)
def read(plan: dict[str, Any], probe: dict[str, str], address: dict[str, Any]) -> tuple[str, float]:
    """What an engine worker does."""
    receiver = HostReceiver()
    receiver.see(probe)
    delivery = receiver.open(Plan.from_wire(plan), {"slot": address, "limit_s": LIMIT_S})
    total = sum(float(tensor.double().sum()) for _, tensor in delivery)
    return delivery.received().digest, total


def test_a_snapshot_reaches_other_processes(store: Any, directory: str) -> None:
    with SlotWriter() as writer:
        snapshot = stage(store, writer, WEIGHTS)
        get(store.mark_committed.remote(snapshot))
        address, probe = get(store.address.remote(snapshot)), get(store.probe.remote())
        answers = get([read.remote(PLAN.to_wire(), probe, address) for _ in range(2)])
    assert answers[0] == answers[1]
    assert answers[0][1] == sum(float(tensor.double().sum()) for tensor in WEIGHTS.values())
    stats = get(store.stats.remote())
    assert isinstance(stats, StoreStats)
    assert (stats.slots, stats.committed, stats.retired) == (1, snapshot, 0)
    assert get(store.discard.remote("0" * 32)) is False


def test_errors_arrive_as_what_they_are(store: Any, directory: str) -> None:
    with pytest.raises(NoRoomError) as caught:
        get(store.open_slot.remote(uuid.uuid4().hex, PLAN.digest, 1 << 50, False))
    cause = caught.value.cause if isinstance(caught.value, ray.exceptions.RayTaskError) else caught.value
    assert (cause.needed_bytes, cause.directory) == ((1 << 50) + 4096, directory)
    assert 0 < cause.available_bytes < 1 << 50
    with pytest.raises(SlotError, match="has no slot"):
        get(store.seal.remote("0" * 32, "1" * 32))
    with pytest.raises(SlotError, match="snapshot must be 32 hex digits"):
        get(store.open_slot.remote("../x", PLAN.digest, 64, False))


def test_a_closed_store_leaves_nothing(store: Any, directory: str) -> None:
    with SlotWriter() as writer:
        stage(store, writer, WEIGHTS)
    pid = get(store.stats.remote()).janitor_pid
    get(store.close.remote())
    get(store.close.remote())
    assert os.listdir(directory) == []
    wait_gone(pid)


def test_a_killed_store_leaves_nothing(store: Any, directory: str) -> None:
    with SlotWriter() as writer:
        snapshot = stage(store, writer, WEIGHTS)
    delivery = HostReceiver().open(PLAN, {"slot": get(store.address.remote(snapshot))})
    pid = get(store.stats.remote()).janitor_pid
    assert len(os.listdir(directory)) == 2
    ray.kill(store)  # SIGKILL, and Ray kills what children the worker has
    wait_gone(pid)
    assert os.listdir(directory) == []
    assert torch.equal(dict(delivery)["w"], WEIGHTS["w"]), "maps keep serving"


@ray.remote(num_cpus=0, max_restarts=0)
class Owner:
    """Stands for the coordinator, which starts the store and owns it."""

    def start(self, node_id: str, directory: str) -> int:
        self.store = start_store(node_id, session="ownedstore", directory=directory, num_slots=2, limit_s=LIMIT_S)
        get(self.store.open_slot.remote(uuid.uuid4().hex, PLAN.digest, PLAN.num_bytes, False))
        return int(get(self.store.stats.remote()).janitor_pid)


def test_a_store_whose_owner_is_killed_leaves_nothing(node_id: str, directory: str) -> None:
    owner = Owner.remote()
    pid = get(owner.start.remote(node_id, directory))
    assert len(os.listdir(directory)) == 2
    ray.kill(owner)
    wait_gone(pid)
    assert os.listdir(directory) == []


def test_what_keeps_a_store_from_starting_is_told_in_its_own_type(node_id: str, directory: str) -> None:
    with pytest.raises(SlotError, match="absolute path"):
        start_store(node_id, session="goodsession", directory="dev/shm", num_slots=2, limit_s=LIMIT_S)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        start_store(node_id, session="goodsession", directory=f"{directory}/nowhere", num_slots=2, limit_s=LIMIT_S)
    with pytest.raises(SlotError, match="num_slots"):
        start_store(node_id, session="goodsession", directory=directory, num_slots=1, limit_s=LIMIT_S)
    assert os.listdir(directory) == []


def test_a_store_that_is_not_ready_in_time_is_named_and_killed(node_id: str, directory: str) -> None:
    with pytest.raises(TimeoutError, match=f"the snapshot store on node {node_id} was not ready after 0.0 s"):
        start_store(node_id, session="goodsession", directory=directory, num_slots=2, limit_s=0.001)
    # had it been left running, its session would be taken
    handle = start_store(node_id, session="goodsession", directory=directory, num_slots=2, limit_s=LIMIT_S)
    get(handle.close.remote())
    ray.kill(handle)


def test_a_node_that_is_not_there_is_an_error_and_no_wait(ray_cluster: str, directory: str) -> None:
    with pytest.raises(ray.exceptions.ActorUnschedulableError):
        start_store("a" * 56, session="goodsession", directory=directory, num_slots=2, limit_s=LIMIT_S)


class Mortal:
    """A process that is gone as soon as a file of that name is there."""

    def __init__(self, grave: str) -> None:
        self.grave = grave

    @property
    def is_gone(self) -> bool:
        return os.path.exists(self.grave)

    def die(self) -> None:
        open(self.grave, "x").close()


def named_store(node_id: str, directory: str, keepers: Keepers) -> tuple[Any, str]:
    name = f"store:{uuid.uuid4().hex}"
    session = uuid.uuid4().hex[:16]
    options = {"name": name, "namespace": "tests", "keepers": keepers}
    return start_store(node_id, session=session, directory=directory, num_slots=2, limit_s=LIMIT_S, **options), name


def test_a_store_of_a_session_that_is_over_ends_itself(node_id: str, directory: str, tmp_path: Path) -> None:
    coordinator, owner = Mortal(f"{tmp_path}/coordinator"), Mortal(f"{tmp_path}/owner")
    store, name = named_store(node_id, directory, Keepers(coordinator=coordinator, owner=owner))
    pid = get(store.stats.remote()).janitor_pid
    owner.die()
    coordinator.die()
    wait_gone(pid)
    assert os.listdir(directory) == []
    deadline = time.monotonic() + LIMIT_S
    while name in [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_store_outlives_its_coordinator_and_belongs_to_the_next_one(node_id: str, directory: str, tmp_path: Path) -> None:
    dead, owner, successor = (Mortal(f"{tmp_path}/{each}") for each in ("dead", "owner", "successor"))
    store, name = named_store(node_id, directory, Keepers(coordinator=dead, owner=owner))
    with SlotWriter() as writer:
        kept, other = (stage(store, writer, WEIGHTS) for _ in range(2))
    dead.die()
    found = ray.get_actor(name, namespace="tests")
    node, _, digests = get(found.adopt.remote(Keepers(coordinator=successor, owner=owner), [kept]))
    assert (node, list(digests)) == (node_id, [kept])
    assert get(found.discard.remote(other)) is False
    pid = get(found.stats.remote()).janitor_pid
    owner.die()  # the successor's to notice
    successor.die()
    wait_gone(pid)
    assert os.listdir(directory) == []
