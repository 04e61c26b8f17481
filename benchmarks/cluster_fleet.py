"""What `cluster.py` measures with: trainers and engines in their places, and rounds between them."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import ray
import torch
from cluster_report import FAILED, MEASURED, NOT_AVAILABLE, Case, NotAvailable, amiss, measurement, refused, round_row, said, transports

import ray_weightsync as rws
from ray_weightsync.fleet.topology import Shape, group_of

CALL_LIMIT_S = 120.0

logger = logging.getLogger(__name__)


def make_module(num_bytes: int, num_tensors: int, device: str) -> torch.nn.Module:
    """``num_tensors`` float32 parameters of equal size, about ``num_bytes`` together."""
    module = torch.nn.Module()
    for index in range(num_tensors):
        values = torch.randn(max(num_bytes // num_tensors // 4 // 256, 1), 256, device=device)
        module.register_parameter(f"weight_{index:04d}", torch.nn.Parameter(values, requires_grad=False))
    return module


def weights_of(make_module: Callable[[], torch.nn.Module]) -> dict[str, torch.Tensor]:
    """The weights of a new module, by name."""
    return dict(make_module().state_dict())


def checkpoint(path: str, device: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint's safetensors files."""
    return {name: tensor.to(device) for name, tensor in rws.SafetensorsSource(path)}


@ray.remote
class Trainer(rws.TrainerMixin):
    """Holds weights, which are other ones after each `step`."""

    def __init__(self, make_weights: Callable[[], dict[str, torch.Tensor]]) -> None:
        self._weights = make_weights()
        self._changing = next(tensor for tensor in self._weights.values() if tensor.is_floating_point() and tensor.element_size() > 1)

    def weight_source(self) -> dict[str, torch.Tensor]:
        return self._weights

    def step(self) -> None:
        with torch.no_grad():
            self._changing.neg_()

    def device(self) -> str:
        """In words, where its weights are."""
        device = self._changing.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


class Fleet:
    """Trainers and engines in their places, until `close`.

    Args:
        placed: Their places.
        count: How many engines.
        megabytes: How large; None for vLLM engines.
        options: The benchmark's.

    Raises:
        WeightSyncError, RayError: if one does not start; nothing is left then.
    """

    def __init__(self, placed: rws.placement.Placed, count: int, megabytes: float | None, options: argparse.Namespace) -> None:
        self.trainers: list[Any] = []
        self.engines: list[Any] = []
        self._count = count
        self._has_backends = megabytes is None and options.gpus
        device = "cuda" if options.gpus else "cpu"
        common: dict[str, Any] = {"num_replicas": count, "env": dict(options.env), "placement": placed}
        spec: rws.TorchEngineSpec | rws.VLLMEngineSpec
        if megabytes is None:
            size, more = options.tensor_parallel_size, options.engine_args
            spec = rws.VLLMEngineSpec(options.model, tensor_parallel_size=size, engine_args=more, **common)
            make_weights = partial(checkpoint, options.model, device)
        else:
            make = partial(make_module, int(megabytes * 2**20), options.tensors, device)
            spec = rws.TorchEngineSpec(make, **common)
            make_weights = partial(weights_of, make)
        try:
            self.trainers += [Trainer.options(**place.options()).remote(make_weights) for place in placed.trainers]
            self.devices = ray.get([trainer.device.remote() for trainer in self.trainers], timeout=options.start_limit_s)
            self.engines += spec.spawn(limit_s=options.start_limit_s)
        except BaseException:
            self.close()
            raise

    def rounds(self, name: str, transport: Any, *, warm_up: int, rounds: int) -> tuple[str, list[dict[str, Any]]]:
        """The rank table, and ``rounds`` rounds of a transport, after some that are not told.

        Raises:
            NotAvailable: if these engines cannot receive by it.
            WeightSyncError: as of ``attach`` and ``send_weights``.
            RuntimeError: if a round was not what is to be measured.
        """
        if isinstance(transport, rws.Native) and not self._has_backends:
            raise NotAvailable(f"{name} is one of vLLM's own backends, which need GPUs: --gpus --engine vllm")
        no_healing = rws.FailurePolicy(auto_heal=False)
        with rws.WeightSync.attach(self.engines, trainers=self.trainers[:1], transport=transport, on_failure=no_healing) as sync:
            shapes = [Shape(id=replica.id, world_size=replica.world_size) for replica in sync.status().replicas]
            rows = send_rounds(sync, name, engines=self._count, change=self._step, warm_up=warm_up, rounds=rounds)
            return group_of(shapes).table(), rows

    def _step(self) -> None:
        ray.get([trainer.step.remote() for trainer in self.trainers], timeout=CALL_LIMIT_S)

    def close(self) -> None:
        """End them. Idempotent."""
        actors, self.trainers, self.engines = (*self.trainers, *self.engines), [], []
        for actor in actors:
            ray.kill(actor)


def send_rounds(
    sync: rws.WeightSync, name: str, *, engines: int, change: Callable[[], None], warm_up: int, rounds: int
) -> list[dict[str, Any]]:
    """Rounds of a session whose engines have not received by this transport before.

    Args:
        sync: The session.
        name: The transport's, from `transports`.
        engines: How many there are.
        change: Gives the trainers other weights.
        warm_up: Rounds before, which are not told.
        rounds: Those that are told.

    Raises:
        NotAvailable: if the first one is refused before an engine was touched.
        WeightSyncError: as of ``send_weights``.
        RuntimeError: if a round was not what is to be measured.
    """
    rows = []
    for number in range(-warm_up, rounds):
        change()
        began = time.perf_counter()
        try:
            report = sync.send_weights(version=f"{name} {number}")
        except Exception as error:
            if number == -warm_up and refused(error):
                raise NotAvailable(said(error)) from error
            raise
        wall_s = time.perf_counter() - began
        if (why := amiss(report, name, engines)) is not None:
            raise RuntimeError(why)
        if number >= 0:
            rows.append(round_row(report, wall_s))
    return rows


def measure_size(
    placed: rws.placement.Placed, cases: Sequence[Case], yardsticks: Mapping[str, Any], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Each transport in turn over the same engines; after a failure over new ones, for it may have left them in any state.

    Args:
        placed: Places for them.
        cases: Of one number of engines, and of one size.
        yardsticks: What their nodes and the link can do.
        options: The benchmark's.
    """
    bucket_bytes = options.bucket_megabytes and options.bucket_megabytes << 20
    by_name = transports(directory=options.directory, interface=options.interface, bucket_bytes=bucket_bytes)
    places = [str(place) for place in (*placed.trainers, *placed.engines)]
    fleet: Fleet | None = None
    broken: str | None = None
    try:
        for case in cases:
            told = partial(measurement, case, placed=places, yardsticks=yardsticks)
            if fleet is None and broken is None:
                try:
                    fleet = Fleet(placed, case.engines, case.megabytes, options)
                except Exception as error:  # it is not tried again for each transport: it may have taken all of the limit
                    logger.exception("the engines for %s did not start", case)
                    broken = said(error)
            if fleet is None:
                yield told(FAILED, reason=broken)
                continue
            try:
                ranks, rows = fleet.rounds(case.transport, by_name[case.transport], warm_up=options.warm_up, rounds=options.rounds)
            except NotAvailable as error:
                yield told(NOT_AVAILABLE, reason=str(error))
            except Exception as error:  # whatever it is, it belongs to this measurement
                logger.exception("%s failed", case)
                fleet.close()
                fleet = None
                yield told(FAILED, reason=said(error))
            else:
                yield told(MEASURED, ranks=ranks, rounds=rows, devices=fleet.devices)
    finally:
        if fleet is not None:
            fleet.close()
