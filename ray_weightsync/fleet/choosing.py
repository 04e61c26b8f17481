"""What ``transport="auto"`` comes to for one round: the fastest way by which every member can receive, and the fact that decided. Pure.

CUDA IPC lends out the sender's own memory: it reaches workers on the sender's own GPU alone, and a handle travels by Ray only. NCCL takes
one rank a GPU: it reaches workers that have a GPU each, and none of them the sender's. Host memory reaches every engine with our worker
side, on any node. Engines without it (*stock*) receive by the one backend that they were started with, or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_weightsync.config import Collective, Host, Native
from ray_weightsync.engines.facts import DeviceFacts, EngineKind
from ray_weightsync.errors import ConfigError
from ray_weightsync.fleet.topology import Shape, group_of, shape_of
from ray_weightsync.transports.native.backends import traits

if TYPE_CHECKING:
    from ray_weightsync.engines.resolve import Engine

GPU = "cuda"
"""How torch names the GPUs that CUDA IPC and NCCL know."""


BY_CHOICE = ("nccl", "ipc")
"""Backends of vLLM's own whose stock engines are chosen a way to."""


@dataclass(frozen=True, kw_only=True)
class SenderFacts:
    """What decides on the sender's side.

    Attributes:
        node_id: Ray's id of its node.
        device: Where the weights are.
        current: The GPU that its process uses unless told otherwise, which is the one that transports send from. None without a GPU.
        nccl: Whether nccl4py can be used there.
        vllm: Whether vLLM is.
        num_ranks: Ranks of torch's default process group there, of which this one alone sends; 1 without one.
    """

    node_id: str
    device: DeviceFacts
    current: DeviceFacts | None = None
    nccl: bool = False
    vllm: bool = False
    num_ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class MemberFacts:
    """What decides on one member's side.

    Attributes:
        shape: Its id and its sizes.
        kind: What is behind it.
        stock: The backend of an engine without our worker side; None for one that has it.
        devices: Where each of its workers is; empty unless all of them are known.
        nccl: Whether nccl4py can be used in all of its workers. None if they did not say.
    """

    shape: Shape
    kind: EngineKind
    stock: str | None = None
    devices: tuple[DeviceFacts, ...] = ()
    nccl: bool | None = None

    @property
    def id(self) -> str:
        return self.shape.id


@dataclass(frozen=True)
class Choice:
    """How a round goes, and the fact that decided, in words. No transport: there is none, and ``why`` says what to do."""

    transport: Host | Collective | Native | None
    why: str


def member_of(engine: Engine) -> MemberFacts:
    """What is known of an engine that decides."""
    facts, shape = engine.facts, shape_of(engine)
    devices = tuple(worker.device for worker in facts.workers if worker.device is not None) if facts.workers else facts.devices
    # A part of a deployment says how many workers all of its parts have.
    parts = shape.data_parallel_size or 1 if shape.deployment is not None else 1
    known = shape.world_size is not None and len(devices) == shape.world_size // parts
    return MemberFacts(
        shape=shape,
        kind=facts.kind,
        stock=facts.backend if facts.is_stock else None,
        devices=devices if known else (),
        nccl=all(worker.nccl for worker in facts.workers) if facts.workers else None,
    )


def choose(sender: SenderFacts, members: Sequence[MemberFacts], *, all_or_none: bool = False) -> Choice:
    """How a round of ``sender`` to ``members``, serving or not, is to go.

    Args:
        sender: Where the weights are, and what its process has.
        members: Who takes part.
        all_or_none: The round is to be taken back if one fails, for which the version before has to be kept.
    """
    guarded = [member for member in members if member.stock is None]
    stock = [member for member in members if member.stock is not None]
    if not stock:
        return _guarded(sender, guarded, all_or_none)
    if guarded:
        return Choice(None, f"{_each(stock)} are on vLLM's own backends and {_names(guarded)} are not: no transport reaches both")
    if all_or_none:
        return Choice(None, f"{_each(stock)} cannot be brought back to the version before, which after_start='all_or_none' needs")
    return _stock(sender, stock)


def out_of_reach(transport: Host | Collective | Native, sender: SenderFacts, members: Sequence[MemberFacts]) -> str | None:
    """Why a transport that was asked for cannot get from the sender's GPU to these members; None if it might. What is not known, might.

    It would be found in the middle of an update otherwise, with all engines torn, or stuck.
    """
    if isinstance(transport, Native) and (why := _waits_for_ranks(sender, transport.backend)) is not None:
        return why
    if sender.current is None or isinstance(transport, Host):
        return None
    placed = [member for member in members if member.devices]
    if on_cpu := [member for member in placed if any(device.type != GPU for device in member.devices)]:
        return f"{_names(on_cpu)} are not on GPUs, and the sender's bytes go from its GPU {sender.current.uuid}"
    if isinstance(transport, Native) and transport.backend == "ipc":
        away = [member for member in placed if _known(member) and any(device != sender.current for device in member.devices)]
        return f"{_names(away)} are not on the sender's GPU {sender.current.uuid}, and CUDA IPC reaches no other" if away else None
    if isinstance(transport, Native) and not traits(transport.backend).grouped:
        return None
    if sharing := [member for member in placed if sender.current.uuid is not None and sender.current in member.devices]:
        return f"{_names(sharing)} share the sender's GPU {sender.current.uuid}, and NCCL takes one rank a GPU"
    if (why := _no_group(members)) is not None or isinstance(transport, Native):
        return why
    ours = [member for member in members if member.stock is None]  # the others join by vLLM's own NCCL
    return _no_nccl(sender, [member for member in ours if member.nccl is not None]) if ours else None


def not_from_gpu(sender: SenderFacts) -> str | None:
    """Why the weights cannot go from GPU to GPU, as far as the sender alone decides it; None if they might."""
    if sender.device.type != GPU:
        there = "has no GPU" if sender.current is None else "has a GPU, which they are not on"
        return f"the weights are on {_shown(sender.device)} (the sender's process {there})"
    if sender.device.uuid is None:
        return "it cannot be told which GPU the weights are on"
    if sender.current != sender.device:
        now = "unknown" if sender.current is None else _shown(sender.current)
        return f"the weights are on {_shown(sender.device)}, the current one of the sender's process is {now}: torch.cuda.set_device helps"
    return None


def _guarded(sender: SenderFacts, members: Sequence[MemberFacts], all_or_none: bool) -> Choice:
    why_not = not_from_gpu(sender) or _not_on_gpus(members)
    if why_not is not None:
        return Choice(Host(), why_not)
    sharing = [member for member in members if sender.device in member.devices]
    if not sharing:
        why_not = _sync(members) or _no_group(members) or _no_nccl(sender, members)
        if why_not is not None:
            return Choice(Host(), why_not)
        # What auto promises does not change from round to round: who is lost comes back from what is kept.
        return Choice(Collective(keep_snapshot=True), "every worker has a GPU of its own, and NCCL is installed on both sides")
    if len(sharing) < len(members) or any(device != sender.device for member in sharing for device in member.devices):
        return Choice(Host(), f"{_names(sharing)} share the sender's GPU and not every worker does: neither NCCL nor CUDA IPC reaches both")
    why_not = _no_ipc(sender, members)
    if why_not is None and all_or_none:
        why_not = "after_start='all_or_none' needs the version before kept, which CUDA IPC does not do"
    if why_not is not None:
        return Choice(Host(), why_not)
    return Choice(Native("ipc"), f"all workers share the sender's GPU {sender.device.uuid}")


def _stock(sender: SenderFacts, members: Sequence[MemberFacts]) -> Choice:
    backends = {member.stock for member in members}
    if len(backends) > 1:
        return Choice(None, f"no transport reaches {_each(members)}; make sessions of their own")
    (backend,) = backends
    if backend not in BY_CHOICE:
        return Choice(None, f"auto does not choose the backend of {_each(members)}; say it: transport=Native({backend!r}, ...)")
    why_not = not_from_gpu(sender)
    if why_not is None and not sender.vllm:
        why_not = f"vLLM is missing in the sender's process, which {_each(members)} need"
    if why_not is None:
        why_not = _no_stock_ipc(sender, members) if backend == "ipc" else _no_stock_nccl(sender, members)
    if why_not is not None:
        return Choice(None, f"{_each(members)} receive by that alone: {why_not}")
    if backend == "ipc":
        return Choice(Native("ipc"), f"{_each(members)}, and all workers share the sender's GPU {sender.device.uuid}")
    return Choice(Collective(), f"{_each(members)}, and the weights are on a GPU that none of them is known to share")


def _no_stock_ipc(sender: SenderFacts, members: Sequence[MemberFacts]) -> str | None:
    if unknown := [member for member in members if not _known(member)]:
        return f"it cannot be seen which GPU {_names(unknown)} are on, and CUDA IPC reaches the sender's alone"
    if away := [member for member in members if any(device != sender.device for device in member.devices)]:
        return f"{_names(away)} are not on the sender's GPU, and CUDA IPC reaches no other"
    return _no_ipc(sender, members)


def _no_stock_nccl(sender: SenderFacts, members: Sequence[MemberFacts]) -> str | None:
    if (elsewhere := _on_no_gpu(members)) is not None:
        return elsewhere
    if sharing := [member for member in members if sender.device in member.devices]:
        return f"{_names(sharing)} share the sender's GPU, and NCCL takes one rank a GPU"
    if turns := [member for member in members if member.kind not in ("async", "http")]:
        return f"{_names(turns)} cannot be called while an update is open (a {turns[0].kind} engine): hold an AsyncLLM, or a server"
    return _no_group(members)


def _sync(members: Sequence[MemberFacts]) -> str | None:
    sync = [member for member in members if member.kind == "sync"]
    return f"{_names(sync)} hold a synchronous LLM, for whose requests nobody can wait while bytes go to the others" if sync else None


def _not_on_gpus(members: Sequence[MemberFacts]) -> str | None:
    if not members:
        return "nobody is there to receive"
    if unknown := [member for member in members if not member.devices]:
        return f"it cannot be seen what every worker of {_names(unknown)} is on"
    if (elsewhere := _on_no_gpu(members)) is not None:
        return elsewhere
    if unnamed := [member for member in members if not _known(member)]:
        return f"it cannot be told which GPU {_names(unnamed)} are on"
    return None


def _on_no_gpu(members: Sequence[MemberFacts]) -> str | None:
    found = ((member, device) for member in members for device in member.devices if device.type != GPU)
    return next((f"{member.id} is on {_shown(device)}" for member, device in found), None)


def _no_ipc(sender: SenderFacts, members: Sequence[MemberFacts]) -> str | None:
    """Why engines on the sender's GPU cannot receive by CUDA IPC."""
    reasons = {
        "sync": "is a synchronous LLM, which cannot be called while an update is open",
        "http": "is behind HTTP, by which no CUDA IPC handle travels (it would have to be unpickled there)",
    }
    for member in members:
        if member.kind != "async":
            return f"{member.id} shares the sender's GPU and {reasons.get(member.kind, f'is a {member.kind} engine, not vLLM in an actor')}"
    if not sender.vllm:
        return "all workers share the sender's GPU, and vLLM, whose CUDA IPC it would be, is missing in the sender's process"
    return _waits_for_ranks(sender, "ipc")


def _waits_for_ranks(sender: SenderFacts, backend: str) -> str | None:
    """Why vLLM's trainer engine would wait for ever in a collective of the trainer's own: nobody but the sender calls it."""
    if sender.num_ranks == 1 or not traits(backend).of_all_ranks:
        return None
    return (
        f"the sender is one of {sender.num_ranks} ranks of torch's default process group, and vLLM's trainer engine of {backend!r} "
        "waits for all of them, while the sender alone calls it"
    )


def no_nccl_in(where: str) -> str:
    """That NCCL cannot be used there, and what helps."""
    return f"nccl4py is missing in {where}, or does not work there, of which the log says why: pip install 'ray_weightsync[nccl]'"


def _no_nccl(sender: SenderFacts, members: Sequence[MemberFacts]) -> str | None:
    """Where nccl4py cannot be used, if anywhere."""
    without = [member for member in members if not member.nccl]
    if sender.nccl and not without:
        return None
    return no_nccl_in(f"workers of {_names(without)}" if sender.nccl else "the sender's process")


def _no_group(members: Sequence[MemberFacts]) -> str | None:
    """Why engines cannot each have ranks, one a GPU."""
    owners: dict[DeviceFacts, str] = {}
    for member in members:
        for device in member.devices:
            if device.uuid is not None and owners.setdefault(device, member.id) != member.id:
                return f"{owners[device]} and {member.id} share GPU {device.uuid}, and NCCL takes one rank a GPU"
        if len(set(member.devices)) < len(member.devices) and _known(member):
            return f"two workers of {member.id} share a GPU, and NCCL takes one rank a GPU"
    try:
        group_of([member.shape for member in members])
    except ConfigError as error:
        return f"the workers cannot be given ranks: {error.message}"
    return None


def _known(member: MemberFacts) -> bool:
    return bool(member.devices) and all(device.uuid is not None for device in member.devices)


def _shown(device: DeviceFacts) -> str:
    if device.type == GPU:
        return f"GPU {device.uuid}"
    return "the CPU" if device.type == "cpu" else f"a device of type {device.type!r}"


def _names(members: Sequence[MemberFacts]) -> str:
    return ", ".join(member.id for member in members)


def _each(members: Sequence[MemberFacts]) -> str:
    return ", ".join(f"{member.id} (backend {member.stock!r})" for member in members)
