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
from cluster_report import FAILED, MEASURED, NOT_AVAILABLE, Case, measurement, round_row, said, transports

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
            ConfigError: if these engines cannot receive by it.
            WeightSyncError: as of ``attach`` and ``send_weights``; also when a single replica is lost.
        """
        if isinstance(transport, rws.Native) and not self._has_backends:
            raise rws.ConfigError(f"{name} is one of vLLM's own backends, which need GPUs: --gpus --engine vllm")
        no_healing = rws.FailurePolicy(auto_heal=False)
        with rws.WeightSync.attach(self.engines, trainers=self.trainers[:1], transport=transport, on_failure=no_healing) as sync:
            shapes = [Shape(id=replica.id, world_size=replica.world_size) for replica in sync.status().replicas]
            rows = []
            for number in range(-warm_up, rounds):
                ray.get([trainer.step.remote() for trainer in self.trainers], timeout=CALL_LIMIT_S)
                began = time.perf_counter()
                report = sync.send_weights(version=f"{name} {number}")
                wall_s = time.perf_counter() - began
                if len(report.committed) < self._count:
                    raise RuntimeError(f"only {', '.join(report.committed) or 'no replica'} of {self._count} took part: {report}")
                if number >= 0:
                    rows.append(round_row(report, wall_s))
            return group_of(shapes).table(), rows

    def close(self) -> None:
        """End them. Idempotent."""
        actors, self.trainers, self.engines = (*self.trainers, *self.engines), [], []
        for actor in actors:
            ray.kill(actor)


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
            except rws.ConfigError as error:
                yield told(NOT_AVAILABLE, reason=said(error))
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
