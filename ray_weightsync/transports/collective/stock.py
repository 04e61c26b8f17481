"""The trainer's end toward engines on vLLM's own ``nccl`` backend, packed or not, in the format that their receiver expects.

What differs from `sender`: the group is made once and lives for many transfers; its other ranks are vLLM's own code, so nobody tells why
it failed and nobody attests what arrived. A receiver that has begun waits in NCCL for all that its ``update_info`` named, without a limit.
So when the source fails, the rest is broadcast as zeros: the engines hold torn weights then, but they answer, and the next transfer
replaces those. When a receiver or the deadline ends a transfer, the group is lost, and whoever is stuck in it has to be killed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from ray_weightsync.errors import ConfigError
from ray_weightsync.transports.collective.communicator import Communicator
from ray_weightsync.transports.collective.deadline import Deadline
from ray_weightsync.transports.collective.handover import Handover
from ray_weightsync.transports.collective.rendezvous import GroupError, address_of
from ray_weightsync.transports.collective.stock_format import VIEWS_SCALARS_SINCE, StockFormat, check
from ray_weightsync.transports.collective.stock_meeting import Means, Meeting, at_socket, by_unique_id, place_told, takes_unique_id
from ray_weightsync.transports.collective.stock_nccl import VllmCommunicator, new_unique_id
from ray_weightsync.transports.collective.stock_packing import StockPacker, broadcast_all
from ray_weightsync.transports.collective.stock_thread import OwnerThread
from ray_weightsync.weights.packing import Packed, pack_each
from ray_weightsync.weights.plan import Plan
from ray_weightsync.worker.identity import node_ip
from ray_weightsync.worker.payload import words_of

logger = logging.getLogger(__name__)

CLOSE_LIMIT_S = 10.0
"""Seconds for the communicator to let go; vLLM gives its own abort 5."""

Join = Callable[[Means, int, torch.device, float], Communicator]
"""Meets the workers as rank 0: what it joins with; ranks in the group; where the buffers are; a limit in seconds."""


class StockSender:
    """Rank 0 of a group with the workers of engines on vLLM's ``nccl`` backend. A context manager.

    It can be met from the moment it is made: at a port that stays its own, or by an NCCL unique id where all can read one (vLLM 0.30).
    Then, in this order: every replica gets `init_info`, all at once, while `join` runs here; for each transfer every replica gets
    ``start_weight_update`` and ``update_weights`` with `update_info`, all at once, while `send` runs here; when both are over,
    ``finish_weight_update``.

    Args:
        form: How transfers are cut.
        world_size: Ranks in the group, this one included.
        vllm: Major and minor of the oldest vLLM in the group, this process's included; see `oldest_release`. It decides how they meet.
            None: not known, they meet at a socket.
        interface: Network interface whose address the workers are told, such as ``"eth0"``, if they meet at a socket.
        address: The address itself. Without either, this node's in Ray.
        device: Where the buffers are. None: the current GPU.
        communicator: What joins. vLLM's own, so vLLM has to be importable here: its receivers do, as they join, what only the same code
            is sure to match, and its rendezvous takes a socket that is bound already.
        unique_id: What makes a unique id, if they meet by one.

    Raises:
        ConfigError: without a GPU; or if the interface or the address is not this machine's.
        GroupError: if vLLM finds no NCCL here to make a unique id.
    """

    def __init__(
        self,
        form: StockFormat,
        *,
        world_size: int,
        vllm: tuple[int, int] | None = None,
        interface: str | None = None,
        address: str | None = None,
        device: torch.device | None = None,
        communicator: Join = VllmCommunicator,
        unique_id: Callable[[], bytes] = new_unique_id,
    ) -> None:
        if world_size < 2:
            raise ConfigError(f"a group of the sender and at least one worker has a world_size of 2 or more, not {world_size}")
        self.form = form
        self.world_size = world_size
        self._device = device or _current_gpu()
        self._join = communicator
        self._meeting: Meeting
        if takes_unique_id(vllm):
            self._meeting = by_unique_id(unique_id())
        else:
            self._meeting = at_socket(address_of(interface) if interface is not None else address or node_ip())
        self._owner = OwnerThread("rws-stock")
        self._communicator: Communicator | None = None
        self._pieces: Handover[torch.Tensor] | None = None
        self._lost: str | None = None
        self._closed = False

    def init_info(self, *, rank_offset: int, world_size: int) -> dict[str, Any]:
        """What ``init_weight_transfer_engine`` of one replica gets. The arguments are `Group.init_payload` of it.

        Raises:
            GroupError: if that is another group's.
        """
        if world_size != self.world_size:
            raise GroupError(f"these ranks are of a group of {world_size}, the sender's is of {self.world_size}")
        return self.form.init_info(self._meeting.told, rank_offset=rank_offset, world_size=world_size)

    def join(self, *, limit_s: float) -> None:
        """Meet all workers, which are in ``init_weight_transfer_engine`` meanwhile.

        Raises:
            TimeoutError: if they have not all come within ``limit_s`` seconds. The group is lost.
            GroupError: if it has joined before, or cannot.
        """
        self._require_whole()
        if self._communicator is not None:
            raise GroupError("this group was joined before")
        joining = self._owner.submit(partial(self._meet, limit_s))
        try:
            joining.result(limit_s)
        except BaseException as error:
            self._lose(f"joining failed: {words_of(error)}")
            if isinstance(error, TimeoutError):
                raise TimeoutError(
                    f"waited {limit_s:.1f} s {self._meeting.shown} for the engines' {self.world_size - 1} workers to join; "
                    f"those that did are stuck until they are killed; {place_told(self._meeting.told, 'collective')}"
                ) from error
            raise

    def send(
        self, pairs: Iterable[tuple[str, torch.Tensor]], plan: Plan, *, limit_s: float, vllm: tuple[int, int] = VIEWS_SCALARS_SINCE
    ) -> Packed:
        """Broadcast one plan's bytes. On return every byte has been sent, which says nothing of what the engines made of it.

        Args:
            pairs: ``(name, tensor)`` in plan order; a source is one. Read on the calling thread.
            plan: What ``pairs`` declared, and the engines' `update_info` was made of.
            limit_s: Seconds for everything: the source and the slowest receiver.
            vllm: Version of the oldest engine, major and minor.

        Returns:
            What was sent. No receiver attests its digest.

        Raises:
            ConfigError: if an engine could not read ``plan``: nothing was sent, and no engine may be told to receive it. Or if ``pairs``
                disagrees with ``plan``.
            TimeoutError: at the limit, saying how far it got. The group is lost.
            GroupError: if the group is lost, before or by `abort`.
            Exception: whatever ``pairs`` raises. The rest was sent as zeros: the engines answer, their weights are torn, and the group
                is whole, unless the error has a note that says otherwise.
        """
        self._require_whole()
        if self._communicator is None:
            raise GroupError("join the group before sending to it")
        check(plan, self.form, vllm=vllm)
        deadline = Deadline(limit_s)
        self._pieces = pieces = Handover[torch.Tensor](self.form.packed_num_buffers)
        packer = StockPacker(pieces, plan, self.form, self._device, deadline)
        broadcasting = self._owner.submit(partial(broadcast_all, self._communicator, pieces, packer))
        try:
            packed = pack_each(pairs, plan, packer.place)
            packer.finish()
            return packed
        except BaseException as error:
            if isinstance(error, Exception) and pieces.failure is None and not deadline.passed:
                self._complete(packer, error)
            else:
                self._lose(words_of(pieces.failure or error))
            raise
        finally:
            self._pieces = None
            if self._lost is None:
                broadcasting.result(CLOSE_LIMIT_S)  # it has nothing left to do

    def abort(self, reason: str) -> None:
        """End `send`, from another thread, such as when a receiver is gone. The group is lost. Idempotent."""
        self._lose(reason)

    def close(self) -> None:
        """Leave the group and free what belongs to it. The engines keep their ends until they are told to shut them down. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._meeting.close()
        if self._communicator is not None:
            self._communicator.abort()
        try:
            self._owner.submit(self._leave).result(CLOSE_LIMIT_S)
        except TimeoutError:
            logger.warning("a call into the group that met %s does not return; its thread is left behind", self._meeting.shown)
            self._owner.stop(0.0)  # should it return after all, the thread ends
            return
        self._owner.stop(CLOSE_LIMIT_S)

    def __enter__(self) -> StockSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _meet(self, limit_s: float) -> None:
        communicator = self._join(self._meeting.means, self.world_size, self._device, limit_s)
        self._communicator = communicator
        if self._lost is not None:  # nobody waits for it any more
            self._leave()

    def _leave(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.close()

    def _complete(self, packer: StockPacker, error: Exception) -> None:
        """The source has failed, and the engines wait for what it did not give."""
        try:
            packer.fill()
        except Exception as failure:
            self._lose(words_of(failure))
            error.add_note(f"The group is lost too: {words_of(failure)}")

    def _lose(self, why: str) -> None:
        if self._lost is None:
            self._lost = why
        if (pieces := self._pieces) is not None:
            pieces.fail(GroupError(why))
        if self._communicator is not None:
            self._communicator.abort()

    def _require_whole(self) -> None:
        if self._closed:
            raise GroupError("this sender was closed")
        if self._lost is not None:
            raise GroupError(f"this group is lost ({self._lost}): kill the engines that are stuck in it, and make a new one")


def _current_gpu() -> torch.device:
    if not torch.cuda.is_available():
        raise ConfigError(
            "vLLM's nccl backend needs a GPU in the trainer, and there is none here",
            hint="on CPU, start the engines with rws.vllm_engine_args() and use the host or the collective transport",
        )
    return torch.device("cuda", torch.cuda.current_device())
