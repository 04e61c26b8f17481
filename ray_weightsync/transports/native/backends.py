"""What is known of vLLM's own weight-transfer backends, by name. A pure table: it imports no vLLM and holds for 0.28 to 0.32."""

from __future__ import annotations

from dataclasses import dataclass

from ray_weightsync.worker.identity import is_installed


@dataclass(frozen=True, kw_only=True)
class BackendTraits:
    """How a round over one of vLLM's backends has to be treated.

    Attributes:
        name: What vLLM's factories know it by.
        attested: Every byte goes through the model's ``load_weights``, so that a guarded worker can digest what it loads.
        grouped: All workers and the trainer are in one group: whoever is lost takes all others with it.
        one_mesh: Its workers are one mesh of ranks: those of one engine, or of one data-parallel deployment.
        needs_source: The trainer's engine reads the weights from a source. Otherwise they are handed to its ``send_weights``.
        layouts: That source says how the trainer's ranks hold each tensor (vLLM's ``M2NWeightSource``).
        module: What vLLM's own ends of it import, and vLLM does not install.
        of_all_ranks: The trainer's engine has collectives over torch's default process group: every rank of that has to call it.
    """

    name: str
    attested: bool = False
    grouped: bool = True
    one_mesh: bool = False
    needs_source: bool = True
    layouts: bool = False
    module: str | None = None
    of_all_ranks: bool = False


_KNOWN = {
    each.name: each
    for each in (
        BackendTraits(name="ipc", attested=True, grouped=False, of_all_ranks=True),
        BackendTraits(name="nccl", attested=True),
        BackendTraits(name="sparse_nccl", needs_source=False),
        BackendTraits(name="sharded_rdt", grouped=False, module="nixl", of_all_ranks=True),
        BackendTraits(name="nccl_m2n", one_mesh=True, layouts=True, module="nccl.m2n"),
    )
}


def missing_module(name: str, end: type) -> str | None:
    """What an end of the backend ``name`` needs that is not installed here. Of ends that are not vLLM's own: nothing."""
    module = traits(name).module
    return module if module is not None and end.__module__.startswith("vllm.") and not is_installed(module) else None


def traits(name: str) -> BackendTraits:
    """The traits of the backend ``name``; for one that is not known here the careful ones: not attested, grouped."""
    return _KNOWN.get(name) or BackendTraits(name=name)
