"""Our own trainer engine toward engines on vLLM's ``nccl`` backend: the face of vLLM's, around `StockSender`.

Where vLLM's waits for ever when an engine fails inside a broadcast, this one ends at a deadline, or as soon as a call to the engines fails.
"""

from __future__ import annotations

import concurrent.futures
import importlib
from functools import partial

import torch

from ray_weightsync.config import Collective, Timeouts
from ray_weightsync.errors import ConfigError
from ray_weightsync.fleet.relay import NativeMembers
from ray_weightsync.protocol.client import VLLMWeightSyncClient
from ray_weightsync.trainer.native import EngineMaker
from ray_weightsync.transports.collective.stock import CLOSE_LIMIT_S, Join, StockSender
from ray_weightsync.transports.collective.stock_format import OLDEST, StockFormat, form_for, update_info
from ray_weightsync.transports.collective.stock_meeting import oldest_release
from ray_weightsync.transports.collective.stock_nccl import VllmCommunicator
from ray_weightsync.transports.collective.stock_thread import OwnerThread
from ray_weightsync.transports.native.source import RoundSource
from ray_weightsync.worker.payload import words_of

FIRST_OFFSET = 1
"""Of the workers of the first engine, after the sender. The client gives each of the others its own."""


class StockTrainer:
    """A group with the engines behind a client, and transfers to them. Makes the group when it is made.

    Args:
        client: Gives every call to all engines, and each engine its own ``rank_offset``.
        source: What each transfer sends; the plan stays the same.
        world_size: Ranks in the group, this one included.
        options: Bytes in one broadcast, buffers, and network interface.
        join_s: Seconds for all workers to join.
        update_s: Seconds for one transfer.
        vllm: As of `StockSender`.
        address: The address that workers are told, if not the interface's.
        device: Where the buffers are. None: the current GPU.
        communicator: What joins; see `StockSender`.

    Raises:
        ConfigError: without a GPU, for an interface that is not there, or a plan that the engines could not read. No engine was told.
        TimeoutError, GroupError: if not all workers joined; those that did are stuck until they are killed.
        Exception: what the client raised.
    """

    def __init__(
        self,
        client: VLLMWeightSyncClient,
        source: RoundSource,
        *,
        world_size: int,
        options: Collective,
        join_s: float,
        update_s: float,
        vllm: tuple[int, int] | None = None,
        address: str | None = None,
        device: torch.device | None = None,
        communicator: Join = VllmCommunicator,
    ) -> None:
        self._client = client
        self._source = source
        plan = source.plan
        self._update_s = update_s
        form: StockFormat = form_for(plan, buffer_bytes=options.bucket_bytes, num_buffers=options.num_buckets, vllm=vllm or OLDEST)
        self._sender = StockSender(
            form,
            world_size=world_size,
            vllm=vllm,
            interface=options.interface,
            address=address,
            device=device,
            communicator=communicator,
        )
        self._calls = OwnerThread("rws-stock-calls")
        try:
            info = self._sender.init_info(rank_offset=FIRST_OFFSET, world_size=world_size)
            joining = self._calls.submit(partial(client.init_weight_transfer_engine, info))
            self._sender.join(limit_s=join_s)
            joining.result(join_s)
        except BaseException:
            self.shutdown()
            raise

    def send_weights(self) -> None:
        """One update of all engines: start, the bytes, finish. No engine attests what it received.

        Raises:
            TimeoutError, GroupError: if an engine or the deadline ended the transfer. The group is lost.
            Exception: what the source or the client raised. If it was the source, the engines have torn weights, and answer.
        """
        plan = self._source.plan
        self._client.start_weight_update()
        receiving = self._calls.submit(partial(self._client.update_weights, update_info(plan)))
        receiving.add_done_callback(self._received)
        try:
            self._sender.send(self._source, plan, limit_s=self._update_s)
        except BaseException:
            concurrent.futures.wait([receiving], timeout=CLOSE_LIMIT_S)  # engines that were given zeros for the rest answer now
            raise
        receiving.result(self._update_s)
        self._client.finish_weight_update()

    def abort(self, reason: str) -> None:
        """End `send_weights` from another thread: an engine is lost. The group is lost. Idempotent."""
        self._sender.abort(reason)

    def shutdown(self) -> None:
        """Leave the group. The engines keep their ends until they are told to shut them down. Idempotent."""
        self._sender.close()
        self._calls.stop(0.0)

    def _received(self, receiving: concurrent.futures.Future[None]) -> None:
        if (error := receiving.exception()) is not None:
            self.abort(words_of(error))


def stock_engine_maker(options: Collective, timeouts: Timeouts) -> EngineMaker:
    """Makes trainer engines of our own, for engines on vLLM's ``nccl`` backend.

    Raises:
        ConfigError: if vLLM cannot be imported here.
    """
    try:
        own: str = importlib.import_module("vllm").__version__
    except ImportError as error:
        raise ConfigError(
            f"engines on vLLM's own 'nccl' backend are met by vLLM's own code, and vLLM cannot be imported in the trainer ({error})",
            hint="install the vLLM of the engines where weights are sent from; or start the engines with rws.vllm_engine_args()",
        ) from error

    def make(client: VLLMWeightSyncClient, source: RoundSource, members: NativeMembers) -> StockTrainer:
        return StockTrainer(
            client,
            source,
            world_size=members.group.world_size,
            options=options,
            join_s=timeouts.connect_s,
            update_s=timeouts.for_bytes("update", source.plan.num_bytes),
            vllm=oldest_release([*members.vllm, own]),
        )

    return make
