"""The ``"rws"`` weight-transfer backend: a `WorkerUpdates` inside each of vLLM's workers.

It owns the translation between vLLM's ``WeightTransferEngine`` and `WorkerUpdates`, and nothing of what they do. Which
receivers there are is said by `ray_weightsync.engines.plugin`, which also registers it. Works with vLLM 0.28 to 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from ray_weightsync.weights.plan import Plan
from ray_weightsync.worker import setup
from ray_weightsync.worker.agreement import over_world_group
from ray_weightsync.worker.identity import resident
from ray_weightsync.worker.receiver import Receiver
from ray_weightsync.worker.reload import LayerwiseReload, restored
from ray_weightsync.worker.ties import Seen, agreeing
from ray_weightsync.worker.twin import check_on_twin
from ray_weightsync.worker.updates import WorkerUpdates

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not typed for us
    """An ``init_weight_transfer_engine`` payload as it came; `WorkerUpdates.init` reads it."""

    payload: Any


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """An ``update_weights`` payload as it came; `WorkerUpdates.update` reads it."""

    payload: Any


class RwsBackend(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """One worker's end of every transport. Subclasses say what it can receive from.

    Only `init_transfer_engine` raises, on the last rank alone; see `ray_weightsync.worker.updates` for why.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update: ClassVar[bool] = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        agreement, everyone = over_world_group(get_world_group(), vllm_config.parallel_config.world_size)
        into = VLLMModel(vllm_config, device, model, everyone.world_size)
        self.updates = WorkerUpdates(into, agreement, self.receivers(into), resident=resident, everyone=everyone)

    def receivers(self, into: VLLMModel) -> Mapping[str, Receiver]:
        """This worker's receivers by their transport's name on the wire.

        Args:
            into: The way into its model.
        """
        raise NotImplementedError

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        """Take anything: a complaint raised here would come from every rank at once, and leave all but the first reply unread."""
        return InitInfo(payload=init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        """Take anything; what is wrong with it is recorded."""
        return UpdateInfo(payload=update_dict)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Carry out one op; see `WorkerUpdates.init`.

        Raises:
            ValueError: on the last rank, with the words of every rank that complains.
        """
        # vLLM sets its config around start, update and finish, but not around this call and the next; some loaders read it.
        with set_current_vllm_config(self.vllm_config):
            self.updates.init(init_info.payload)

    def describe(self, nonce: str) -> dict[str, Any]:
        """What this worker is and holds; see `WorkerUpdates.describe`. Never raises."""
        with set_current_vllm_config(self.vllm_config):
            return self.updates.describe(nonce)

    def start_weight_update(self) -> None:
        """Open a session. Never raises."""
        self.updates.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load. Never raises. (The base class would synchronise an accelerator here, which fails where there is none.)"""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive and load. Never raises."""
        self.updates.update(update_info.payload)

    def finish_weight_update(self) -> None:
        """Close the session, complete or flushed. Never raises."""
        self.updates.finish()

    def shutdown(self) -> None:
        """Release what the receivers hold; the engine stays usable."""
        self.updates.close()


class VLLMModel:
    """The way into the model of one vLLM worker: a `ModelLoader` of `ray_weightsync.worker.updates`.

    Attributes:
        device: Where the model is.
        reload: The model's reload sessions.
    """

    def __init__(self, vllm_config: Any, device: torch.device, model: torch.nn.Module, world_size: int) -> None:
        self._world_size = world_size
        self._vllm_config = vllm_config
        self.device = device
        self._model: Any = model
        self.reload = LayerwiseReload(model, vllm_config.model_config)
        self._loaded = False
        self._unjudged: list[str] = []
        self._ties: dict[str, frozenset[str]] = {}

    def check(self, plan: Plan) -> list[str]:
        """What speaks against loading ``plan`` here, judged on a meta twin."""
        self._unjudged = []
        if plan.target != "main":
            return [f"this engine's backend updates the main model only, not {plan.target!r}"]
        if refused := setup.refusals(self._vllm_config):
            return refused
        with disable_mtp_completeness_check():
            verdict = check_on_twin(
                self._model,
                plan,
                restored=restored,
                world_size=self._world_size,
                aliases=self.reload.aliases,
                shared=self.reload.shared,
            )
        self._unjudged = [*verdict.unjudged, *setup.losses(self._vllm_config)]
        for name, others in verdict.ties.items():  # kept for every plan: where a name leads is the model's affair
            self._ties[name] = self._ties.get(name, frozenset()) | others
        return list(verdict.problems)

    def unjudged(self) -> list[str]:
        """What the latest check could not judge."""
        return list(self._unjudged)

    def start(self) -> None:
        """Open a reload session."""
        self._loaded = False
        self.reload.start()

    def load(self, pairs: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Hand ``pairs`` to the model's own ``load_weights``.

        Raises:
            ValueError: for tied names that bring different values. vLLM would keep whichever is loaded last, without a word.
            Exception: whatever the model's loaders raise.
        """
        self.load_by(self._model.load_weights, pairs, {})
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # copies to a device are asynchronous; their errors belong to this update
        self._loaded = True

    def load_by(self, load_weights: LoadWeights, pairs: Iterable[tuple[str, torch.Tensor]], seen: Seen) -> Any:
        """Hand ``pairs`` to the model's ``load_weights``; returns what that does.

        Args:
            load_weights: The model's own.
            pairs: All of a session's weights, or some.
            seen: What tied weights came before in this session.

        Raises:
            ValueError, Exception: as `load`.
        """
        # As vLLM's own backends do: the check is for checkpoints, and a sender may leave the multi-token-prediction head alone.
        with disable_mtp_completeness_check():
            return load_weights(agreeing(pairs, self._ties, seen))

    def finish(self) -> None:
        """Complete what was loaded as a whole; flush what was not."""
        loaded, self._loaded = self._loaded, False
        if loaded:
            self.reload.finish()
        else:
            self.reload.flush()
