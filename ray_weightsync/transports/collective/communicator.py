"""How bytes get from one rank to all others: the only place where NCCL and gloo differ.

Groups are private: torch's global process group, which the trainer or the engine may be using, is neither used nor made.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ray_weightsync.transports.collective.deadline import Deadline
from ray_weightsync.transports.collective.group_store import GroupStore
from ray_weightsync.transports.collective.rendezvous import SENDER, BackendName, GroupError, local_address_towards

_POLL_S = 0.0005
_UNIQUE_ID = "nccl"
_PLACE = re.compile(r"^\[[^]]*:\d+\] ")


class Communicator(Protocol):
    """One rank's membership in a group. It belongs to one thread; only `abort` may come from another one.

    Attributes:
        rank: This rank, from 0.
        world_size: Number of ranks.
        device: Where the buffers must be.
        passes_on: Whether others' bytes may still be on their way through this rank when its own are complete.
    """

    rank: int
    world_size: int
    device: torch.device
    passes_on: bool

    def broadcast(self, buffer: torch.Tensor, src: int) -> None:
        """Fill ``buffer`` on every rank with what it holds on ``src``. Complete on return.

        Args:
            buffer: Flat, contiguous uint8 on `device`, of the same size on every rank.
            src: The rank that sends.

        Raises:
            TimeoutError: if it is not complete at the deadline.
            GroupError: if a member is gone, or this membership was aborted.
        """
        ...

    def abort(self) -> None:
        """Give up what is under way, as soon as the backend can. Idempotent."""
        ...

    def close(self) -> None:
        """Leave the group and free what belongs to it. Idempotent."""
        ...


def buffer_device(backend: BackendName) -> torch.device:
    """Where a backend wants its buffers: the calling thread's current GPU for NCCL, host memory for gloo."""
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def join(store: GroupStore, device: torch.device, deadline: Deadline) -> Communicator:
    """Meet the other ranks in ``store`` and become a member. All that the communicator does has to be over by ``deadline``.

    Args:
        store: This rank's.
        device: As `buffer_device` says.
        deadline: For everything.

    Raises:
        TimeoutError: if not all ranks came in time.
        GroupError: if one of them failed.
    """
    store.join(deadline)
    if store.rendezvous.backend == "nccl":
        return NcclCommunicator(store, device, deadline)
    return GlooCommunicator(store, device, deadline)


class GlooCommunicator:
    """A `ProcessGroupGloo` over a full mesh of TCP connections, on the CPU.

    gloo cannot be interrupted (torch's ``abort`` of it leaves a pending broadcast pending, seen on 2.13), but each operation has a
    timeout, and the end of a member's process, or of its membership, breaks everybody's pending operations at once. So `abort` only
    marks, and no operation is ever given more time than is left.
    """

    passes_on = False  # what was written to a socket arrives, also after it was closed

    def __init__(self, store: GroupStore, device: torch.device, deadline: Deadline) -> None:
        rendezvous = store.rendezvous
        self.rank = store.rank
        self.world_size = rendezvous.world_size
        self.device = device
        self._deadline = deadline
        self._aborted = False
        backend: Any = dist.ProcessGroupGloo  # its options are not in torch's type stubs
        options = backend._Options()
        options._timeout = deadline.as_timeout()
        options._threads = 1
        # Not lazily: a connection that is only made by the first broadcast ignores its timeout (pytorch/gloo#520).
        hostname = local_address_towards(rendezvous.address, rendezvous.port)
        options._devices = [backend.create_device(hostname=hostname, lazy_init=False)]
        self._meeting = store.for_backend()  # the group does not keep the Python half of it
        try:
            self._group: Any = backend(self._meeting, self.rank, self.world_size, options)
        except RuntimeError as error:
            raise _gloo_error(error, "joining", deadline) from error

    def broadcast(self, buffer: torch.Tensor, src: int) -> None:
        """See `Communicator`."""
        if self._group is None or self._aborted:
            raise GroupError("the group was aborted")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        options.timeout = self._deadline.as_timeout()
        try:
            self._group.broadcast([buffer], options).wait()
        except RuntimeError as error:
            raise _gloo_error(error, "a broadcast", self._deadline) from error

    def abort(self) -> None:
        """Begin no further broadcast; the pending one ends at its timeout, or when any other member leaves."""
        self._aborted = True

    def close(self) -> None:
        """See `Communicator`. Waits for a pending operation."""
        self._group = None


def _gloo_error(error: RuntimeError, what: str, deadline: Deadline) -> Exception:
    words = _PLACE.sub("", str(error)).partition(". This is typically")[0]  # gloo's source line before, its guesses after
    if deadline.passed:
        return TimeoutError(f"{what} was not over after {deadline.limit_s:.1f} s: {words}")
    return GroupError(f"{what} failed: {words}")


class NcclCommunicator:
    """NCCL through nccl4py (``pip install 'ray_weightsync[nccl]'``), NVIDIA's own binding.

    Why not what is there already: torch's ``ProcessGroupNCCL`` brings a watchdog that by default takes the whole process down when
    a peer is lost (``TORCH_NCCL_ASYNC_ERROR_HANDLING=3``): one dead worker would end every engine and the trainer. vLLM's
    ``PyNcclCommunicator`` is not to be had in a trainer without vLLM, and its init blocks without a limit. nccl4py has what a deadline
    needs: communicators that do not block while they are made, a state that can be polled, an ``abort`` that frees pending kernels,
    and unique ids as bytes, which the group's store carries.

    Only NCCL's own calls are here. Not yet run: see ``tests/gpu/test_gpu_collective.py``.
    """

    passes_on = True

    def __init__(self, store: GroupStore, device: torch.device, deadline: Deadline) -> None:
        nccl = importlib.import_module("nccl.core")
        self._results = importlib.import_module("nccl.bindings.nccl").Result
        self.rank = store.rank
        self.world_size = store.rendezvous.world_size
        self.device = device
        self._cuda: Any = torch.cuda  # partly untyped
        self._cuda.set_device(device)  # of this thread: a new one begins with GPU 0
        self._deadline = deadline
        self._store = store
        self._aborted = False
        self._stream = self._cuda.Stream(self.device)
        unique_id = self._unique_id(nccl)
        self._comm: Any = nccl.Communicator.init(self.world_size, self.rank, unique_id, nccl.NCCLConfig(blocking=False))
        try:
            self._wait_until_idle("joining")
        except BaseException:
            self.close()
            raise

    def broadcast(self, buffer: torch.Tensor, src: int) -> None:
        """See `Communicator`. Runs on a stream of its own, after what the current one has been given."""
        if self._comm is None or self._aborted:
            raise GroupError("the group was aborted")
        self._stream.wait_stream(self._cuda.current_stream(self.device))
        self._comm.broadcast(buffer, buffer, src, stream=self._stream.cuda_stream)
        self._wait_until_idle("a broadcast")
        until_done(self._stream, lambda: self._check("a broadcast"))
        if self._aborted:  # an aborted kernel ends like one that is complete
            raise GroupError("the group was aborted")

    def abort(self) -> None:
        """See `Communicator`: the thread that waits for the pending broadcast sees the mark and ends it."""
        self._aborted = True

    def close(self) -> None:
        """See `Communicator`. Aborts: ``destroy`` is a collective of the ranks on a node, and would wait for one that is gone."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()

    def _unique_id(self, nccl: Any) -> Any:
        """NCCL's id of the group. With each goes a thread and a socket of the sender's process, which end when all ranks have come to
        them and not before (seen with NCCL 2.32): so it is made when all have joined.
        """
        if self.rank == SENDER:
            made = nccl.get_unique_id()
            self._store.set_value(_UNIQUE_ID, bytes(made))
            return made
        there = self._store.await_values([_UNIQUE_ID], self._deadline)
        if _UNIQUE_ID not in there:
            raise TimeoutError(f"waited {self._deadline.limit_s:.1f} s for the sender to make NCCL's unique id")
        return nccl.UniqueId.from_bytes(there[_UNIQUE_ID])

    def _wait_until_idle(self, what: str) -> None:
        while self._comm.get_async_error() == self._results.InProgress:
            self._check(what)
            time.sleep(_POLL_S)
        self._check(what)

    def _check(self, what: str) -> None:
        """Raise, and end what is pending, if it was aborted, is late, or a member is gone."""
        state = self._comm.get_async_error()
        failed = state not in (self._results.Success, self._results.InProgress)
        given_up = self._aborted or self._store.halted  # before it has joined, nobody else has it to abort it
        if not (failed or given_up or self._deadline.passed):
            return
        words = self._comm.get_last_error() if failed else ""
        self.close()
        if failed:
            said = next((result.name for result in self._results if result == state), state)  # nccl4py tells it as a plain int
            raise GroupError(f"{what} failed: NCCL says {said}: {words}")
        if given_up:
            raise GroupError("the group was aborted")
        raise TimeoutError(f"{what} was not over after {self._deadline.limit_s:.1f} s")


def until_done(stream: Any, check: Callable[[], None]) -> None:
    """Wait for all that a CUDA stream was given. Meanwhile ``check`` is called, which raises when nobody is to wait any longer."""
    cuda: Any = torch.cuda  # partly untyped
    done = cuda.Event()
    done.record(stream)
    while not done.query():
        check()
        time.sleep(_POLL_S)
