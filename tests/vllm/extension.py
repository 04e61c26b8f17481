"""The fault kit's worker extension, and what only these tests ask of a worker. Imported in engine workers only: it brings vLLM with it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ray_weightsync.testing import extension


class FaultyExtension(extension.FaultyExtension):
    """Faults in places that are vLLM's own, and a look at what is left in a worker."""

    def rws_test_fail(self, ranks: list[int], steps: list[str]) -> None:
        """From now on these ranks fail in these steps: ``start``, ``load`` (half way), ``finish`` (inside vLLM's own finalize).

        ``skip`` is a loader that leaves one layer out without a word, as vLLM's do with names they do not care for; ``raise in load`` one
        that fails in the middle, whoever gave it the tensors.
        """
        self.rws_test_heal()
        if self.rank not in ranks:
            return
        model = self.weight_transfer_engine.updates._model._model
        patches = {
            "skip": (model, "load_weights", _skipping(model.load_weights)),
            "raise in load": (model, "load_weights", _half_loading(model.load_weights)),
            # A vocabulary of 2047 is padded, so the embedding is never complete on its own: finalize processes it.
            "finish": (_embedding(model).quant_method, "process_weights_after_loading", _raising("made to fail in finish")),
        }
        if steps:
            self._rws_test_directory = tempfile.mkdtemp(prefix="rws-tests-")
        for step in steps:
            if step in patches:
                self._rws_test_patched.append(patches[step])
            else:
                spec = {"replica": "under test", "phase": step, "kind": "raise", "rank": self.rank, "times": 1000}
                self._rws_faults().obey({"op": "arm", "id": step, "directory": self._rws_test_directory, "spec": spec})
        for owner, name, patch in self._rws_test_patched:
            setattr(owner, name, patch)

    def rws_test_heal(self) -> None:
        """Take the faults out again."""
        self._rws_faults().heal()
        for owner, name, _ in getattr(self, "_rws_test_patched", ()):
            delattr(owner, name)
        self._rws_test_patched: list[tuple[Any, str, Any]] = []
        if (directory := getattr(self, "_rws_test_directory", None)) is not None:
            shutil.rmtree(directory)
            self._rws_test_directory = None

    def rws_test_write_into_what_is_loaded(self) -> None:
        """The next load zeroes every tensor it was given that is loaded at once, as some loaders do with what they do not need."""
        model = self.weight_transfer_engine.updates._model._model
        load = model.load_weights

        def overwriting(pairs: Iterator[tuple[str, torch.Tensor]]) -> Any:
            given = []

            def noted() -> Iterator[tuple[str, torch.Tensor]]:
                for name, tensor in pairs:
                    if name.endswith("norm.weight"):
                        given.append(tensor)
                    yield name, tensor

            loaded = load(noted())
            for tensor in given:
                tensor.zero_()
            return loaded

        self._rws_test_patched = [(model, "load_weights", overwriting)]
        model.load_weights = overwriting

    def rws_test_leave_open(self) -> None:
        """What somebody leaves behind who starts a reload in the worker and does not come back."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.weight_transfer_engine.updates._model._model)

    def rws_test_raise(self, rank: int) -> int:
        """Somebody else's RPC that fails on one rank."""
        if self.rank == rank:
            raise RuntimeError("somebody else's failure")
        return self.rank

    def rws_test_leftovers(self) -> list[str]:
        """What is on meta, or still being reloaded, in the live model."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        model = self.weight_transfer_engine.updates._model._model
        left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
        return left + [name for name, layer in model.named_modules() if get_layerwise_info(layer).can_load()]

    def rws_test_pieces(self, seconds: float | None) -> None:
        """Judge plans for that long between two steps; None: as long as always."""
        from ray_weightsync.worker import plans

        self._rws_test_piece_s = getattr(self, "_rws_test_piece_s", plans.PIECE_S)
        plans.PIECE_S = self._rws_test_piece_s if seconds is None else seconds

    def rws_test_maps(self) -> list[str]:
        """The maps of snapshots in this process; each is a lease on one."""
        with open("/proc/self/maps") as maps:
            return [line.split()[-1] for line in maps if "/rws-" in line]

    def rws_test_identities(self) -> list[int]:
        """Where the live parameters lie; a check that touched them would have replaced them."""
        model = self.weight_transfer_engine.updates._model._model
        return [id(parameter) for parameter in model.parameters()]


def _raising(words: str) -> Callable[..., None]:
    def fail(*args: Any) -> None:
        raise RuntimeError(words)

    return fail


def _skipping(load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda pairs: load((name, tensor) for name, tensor in pairs if name != "model.layers.2.mlp.down_proj.weight")


def _half_loading(load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def half(pairs: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in pairs:
            if name.startswith("model.layers.2"):
                raise RuntimeError("made to fail in load_weights")
            yield name, tensor

    return lambda pairs: load(half(pairs))


def _embedding(model: torch.nn.Module) -> Any:
    return model.get_submodule("model.embed_tokens")
