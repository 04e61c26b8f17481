"""A module as a source: names without wrappers, shards gathered, ties honest, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ray_weightsync.errors import ConfigError
from ray_weightsync.weights import ties
from ray_weightsync.weights.digest import weights_digest
from ray_weightsync.weights.plan import ParamMeta, Plan
from ray_weightsync.weights.sources import ModuleSource, checked


class Tiny(nn.Module):
    """An embedding, a layer with a buffer, and a head that may be tied to the embedding."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embed


NAMES = ["embed.weight", "norm.weight", "norm.bias", "head.weight"]


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def arrives(source: ModuleSource) -> dict[str, torch.Tensor]:
    plan = Plan.from_metadata(source.metadata())
    return {spec.name: tensor for spec, tensor in checked(source, plan)}


def test_parameters_arrive_detached_under_their_names_and_share_memory() -> None:
    module = Tiny()
    source = ModuleSource(module)
    assert source.metadata()[0] == ParamMeta("embed.weight", torch.float32, (5, 3))
    arrived = arrives(source)
    assert list(arrived) == NAMES
    assert not any(tensor.requires_grad for tensor in arrived.values())
    assert arrived["head.weight"].data_ptr() == module.head.weight.data_ptr()


def test_each_round_sends_the_values_of_then() -> None:
    module = Tiny()
    source = ModuleSource(module)
    before = weights_digest(source)
    with torch.no_grad():
        module.head.weight[0, 0] += 1
    assert weights_digest(source) != before
    module.extra = nn.Parameter(torch.ones(1))
    assert "extra" in arrives(source)


def test_iterating_leaves_the_callers_grad_mode_alone() -> None:
    for _ in ModuleSource(Tiny()):
        assert torch.is_grad_enabled()


def test_skip_and_buffers_take_names_and_patterns_and_each_must_fit() -> None:
    module = Tiny()
    arrived = arrives(ModuleSource(module, skip="*.bias", buffers=["norm.running_*"]))
    assert list(arrived) == ["embed.weight", "norm.weight", "head.weight", "norm.running_mean", "norm.running_var"]
    assert arrives(ModuleSource(module, buffers="norm.num_batches_tracked"))["norm.num_batches_tracked"].dtype is torch.int64
    with pytest.raises(ConfigError, match=r"buffers: 'embed.weight' fits none of the 3"):
        ModuleSource(module, buffers=["embed.weight"])
    with pytest.raises(ConfigError, match=r"skip: 'nrom.weight' fits none"):
        ModuleSource(module, skip=["nrom.weight"])


def test_nan_is_rejected_by_name_only_when_asked() -> None:
    module = Tiny()
    with torch.no_grad():
        module.norm.bias[0] = float("nan")
    assert arrives(ModuleSource(module))["norm.bias"].isnan().any()
    with pytest.raises(ConfigError, match=r"'norm\.bias' holds NaN"):
        list(ModuleSource(module, reject_nonfinite=True))


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        (nn.Parameter(torch.ones(2, device="meta")), "'wrong' is on the meta device"),
        (nn.Parameter(torch.eye(2).to_sparse()), "'wrong' has the layout"),
        (nn.UninitializedParameter(), "'wrong' is not initialised yet"),
    ],
    ids=["meta", "sparse", "lazy"],
)
def test_a_parameter_without_values_is_refused_by_name_when_made(parameter: nn.Parameter, words: str) -> None:
    module = Tiny()
    module.wrong = parameter
    with pytest.raises(ConfigError, match=words):
        ModuleSource(module)
    assert list(arrives(ModuleSource(module, skip="wrong"))) == NAMES


def test_something_that_is_no_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes a torch.nn.Module, not dict"):
        ModuleSource({})  # type: ignore[arg-type]


def test_wrappers_leave_no_trace_in_names(process_group: None) -> None:
    wrapped = [
        nn.parallel.DistributedDataParallel(Tiny()),
        nn.DataParallel(Tiny()),
        torch.optim.swa_utils.AveragedModel(Tiny()),
        torch.compile(Tiny(), backend="eager"),
        torch.compile(nn.parallel.DistributedDataParallel(Tiny()), backend="eager"),
        nn.parallel.DistributedDataParallel(torch.compile(Tiny(), backend="eager")),
    ]
    inner = Tiny()
    inner.embed = torch.compile(inner.embed, backend="eager")  # type: ignore[assignment]
    for module in [*wrapped, inner]:
        assert [meta.name for meta in ModuleSource(module).metadata()] == NAMES


def test_skip_and_buffers_speak_of_names_without_wrappers() -> None:
    source = ModuleSource(nn.DataParallel(Tiny()), skip="norm.bias", buffers="norm.running_mean")
    assert [meta.name for meta in source.metadata()] == ["embed.weight", "norm.weight", "head.weight", "norm.running_mean"]


def test_a_model_that_calls_a_part_of_its_own_module_keeps_that_name() -> None:
    inner = nn.Module()
    inner.module = nn.Linear(1, 1, bias=False)
    inner.decoder = nn.DataParallel(nn.DataParallel(nn.Linear(1, 1, bias=False)))
    assert [meta.name for meta in ModuleSource(inner).metadata()] == ["module.weight", "decoder.weight"]
    assert [meta.name for meta in ModuleSource(nn.DataParallel(inner)).metadata()] == ["module.weight", "decoder.weight"]


def test_fsdp1_names_are_stripped_where_parameters_are_whole_and_flat_ones_refused(process_group: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    def wrap(**kwargs: Any) -> nn.Module:
        module = Tiny()
        options = {"sharding_strategy": ShardingStrategy.NO_SHARD, "device_id": torch.device("cpu"), **kwargs}
        return FullyShardedDataParallel(module, **options)

    try:
        whole, flat = wrap(use_orig_params=True), wrap(use_orig_params=False)
    except (RuntimeError, AssertionError, FutureWarning) as error:
        pytest.skip(f"this torch does not wrap on a CPU: {error}")
    assert list(arrives(ModuleSource(whole))) == NAMES
    with pytest.raises(ConfigError, match=r"(?s)sharded by FSDP1.*fully_shard"):
        ModuleSource(flat)


def test_a_module_sharded_by_fsdp1_is_refused() -> None:
    fsdp = type("FullyShardedDataParallel", (Tiny,), {"__module__": "torch.distributed.fsdp.fully_sharded_data_parallel"})()
    fsdp.process_group = SimpleNamespace(size=lambda: 2)
    fsdp.sharding_strategy = SimpleNamespace(name="FULL_SHARD")
    with pytest.raises(ConfigError, match="sharded by FSDP1"):
        ModuleSource(nn.Sequential(fsdp))
    fsdp.sharding_strategy = SimpleNamespace(name="NO_SHARD")
    assert list(arrives(ModuleSource(fsdp))) == NAMES


def test_dtensors_are_gathered_while_iterating_and_never_for_metadata(process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    module = Tiny(tied=True)
    whole = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    sharded = nn.Parameter(distribute_tensor(module.embed.weight.detach(), mesh, [Shard(1)]))
    module.embed.weight = module.head.weight = sharded
    gathered: list[str] = []
    full_tensor = DTensor.full_tensor

    def counted(self: Any, **kwargs: Any) -> torch.Tensor:
        gathered.append("gather")
        return full_tensor(self, **kwargs)

    monkeypatch.setattr(DTensor, "full_tensor", counted)
    source = ModuleSource(module)
    assert source.metadata()[0] == ParamMeta("embed.weight", torch.float32, (5, 3))
    assert source.tied_names() == [("embed.weight", "head.weight")]
    assert gathered == []
    pairs = iter(source)
    name, tensor = next(pairs)
    assert gathered == ["gather"], "one at a time"
    assert type(tensor) is torch.Tensor
    arrived = {name: tensor, **dict(pairs)}
    assert torch.equal(arrived["head.weight"], whole["embed.weight"])
    assert torch.equal(arrived["embed.weight"], whole["embed.weight"])
    with pytest.raises(ConfigError, match=r"(?s)'a' is a DTensor.*full_tensor\(\)"):
        list(checked([("a", sharded)], Plan.from_metadata([ParamMeta("a", torch.float32, (5, 3))])))


def test_a_gather_that_returns_before_it_is_complete_is_waited_for() -> None:
    order: list[str] = []

    class Pending(torch.Tensor):
        def wait(self) -> torch.Tensor:
            order.append("waited")
            return torch.ones(2)

    class Sharded(torch.Tensor):
        def full_tensor(self) -> torch.Tensor:
            order.append("gathered")
            return torch.ones(2).as_subclass(Pending)

    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(2).as_subclass(Sharded))
    assert dict(ModuleSource(module))["weight"].tolist() == [1, 1]
    assert order == ["gathered", "waited"]


# -- tied weights ------------------------------------------------------------------------------------------------------


def test_a_tied_weight_is_found_by_storage_and_sent_under_each_name() -> None:
    source = ModuleSource(Tiny(tied=True))
    assert source.tied_names() == [("embed.weight", "head.weight")]
    arrived = arrives(source)
    assert list(arrived) == NAMES
    assert torch.equal(arrived["embed.weight"], arrived["head.weight"])
    assert ModuleSource(Tiny()).tied_names() == []


def test_only_the_same_elements_in_the_same_layout_count_as_tied() -> None:
    base = torch.arange(16.0)
    tensors = {
        "a": base[:4],
        "b": base[:4].view(2, 2),
        "c": base[4:8],
        "d": base[:4].view(2, 2).t(),
        "e": base[:4].view(torch.int32),
        "same as a": base[:4],
        "empty": torch.empty(0),
        "another empty": torch.empty(0),
        "conjugate": torch.view_as_complex(base.view(8, 2)),
        "conjugated": torch.view_as_complex(base.view(8, 2)).conj(),
    }
    assert ties.shared_names(tensors) == [("a", "same as a")]


DICT = {"head.weight": "embed.weight"}


@pytest.mark.parametrize("keys", [DICT, ["head.weight"], [r"head\.w.*"], {"head.weight"}], ids=["dict", "list", "pattern", "set"])
def test_names_declared_tied_that_disagree_are_an_error_before_the_first_tensor(keys: Any) -> None:
    module = Tiny()
    module._tied_weights_keys = keys
    wrapped = nn.DataParallel(nn.Sequential(module))
    with pytest.raises(ConfigError, match=r"(?s)'0\.head\.weight' and '0\.embed\.weight' are declared tied.*tie_weights"):
        next(iter(ModuleSource(wrapped)))
    with torch.no_grad():
        module.head.weight.copy_(module.embed.weight)
    assert list(arrives(ModuleSource(module))) == NAMES, "equal copies are as good as tied"
    module.head.weight = module.embed.weight
    assert list(arrives(ModuleSource(module))) == NAMES


def test_equal_nans_do_not_make_a_tie_disagree_and_other_dtypes_do() -> None:
    module = Tiny()
    module._tied_weights_keys = DICT  # type: ignore[assignment]
    with torch.no_grad():
        module.embed.weight.fill_(float("nan"))
        module.head.weight.fill_(float("nan"))
    assert list(arrives(ModuleSource(module))) == NAMES
    module.head.weight = nn.Parameter(module.head.weight.bfloat16())
    with pytest.raises(ConfigError, match="declared tied"):
        arrives(ModuleSource(module))


def test_a_tie_that_the_config_switches_off_or_a_skip_leaves_out_is_none() -> None:
    module = Tiny()
    module._tied_weights_keys = DICT  # type: ignore[assignment]
    assert "head.weight" not in arrives(ModuleSource(module, skip="head.weight"))
    module.config = SimpleNamespace(tie_word_embeddings=False)  # type: ignore[assignment]
    assert list(arrives(ModuleSource(module))) == NAMES
    module.config.tie_word_embeddings = True
    with pytest.raises(ConfigError, match="declared tied"):
        arrives(ModuleSource(module))


def test_a_model_that_can_expand_its_ties_is_asked() -> None:
    module = Tiny()
    module._tied_weights_keys = {"head": "embed"}  # type: ignore[assignment]
    assert list(arrives(ModuleSource(module))) == NAMES
    module.get_expanded_tied_weights_keys = lambda all_submodels: DICT  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="declared tied"):
        arrives(ModuleSource(module))


def test_keys_of_another_type_are_refused() -> None:
    module = Tiny()
    module._tied_weights_keys = "head.weight"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="must be a dict or a list of names, not str"):
        list(ModuleSource(module))


# -- PEFT --------------------------------------------------------------------------------------------------------------


def _peft_modules() -> dict[str, nn.Module]:
    configured = Tiny()
    configured.peft_config = {"default": object()}  # type: ignore[assignment]
    layer = type("Linear", (nn.Linear,), {"__module__": "peft.tuners.lora.layer"})(2, 2)
    property_ = type("Wrapped", (Tiny,), {"peft_config": property(lambda self: {})})()
    adapted = Tiny()
    adapted.head.lora_A = nn.ModuleDict({"default": nn.Linear(3, 1)})
    return {"peft_config": configured, "a layer of peft's": nn.Sequential(layer), "a property": property_, "LoRA weights": adapted}


@pytest.mark.parametrize("kind", _peft_modules())
def test_a_peft_module_is_refused_with_the_sentence_that_helps(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"(?s)PEFT module cannot be sent.*merge_and_unload\(\)"):
        ModuleSource(_peft_modules()[kind])
