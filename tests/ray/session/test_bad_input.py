"""What is wrong is refused before anything changed: old weights are served, under the old version, by engines that are not paused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch

import ray_weightsync as rws
from ray_weightsync.fleet.actor import find_coordinator
from tests.ray.session.conftest import LIMIT_S, Fleet, make_module

StartFleet = Callable[..., Fleet]


@ray.remote(num_cpus=0)
class NoEngine:
    def hello(self) -> str:
        return "hello"


@ray.remote(num_cpus=0)
class HalfEngine:
    """Speaks all of the protocol but one verb."""

    def init_weight_transfer_engine(self, request: Any) -> None: ...

    def start_weight_update(self) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class TestAttach:
    @pytest.mark.parametrize("engines", [[], (), None, 3, [3], [None]], ids=repr)
    def test_no_engines_or_a_wrong_type_is_refused(self, engines: Any) -> None:
        with pytest.raises(rws.ConfigError):
            rws.WeightSync.attach(engines)

    def test_the_same_engine_twice_is_refused(self, engine_pool: list[Any]) -> None:
        with pytest.raises(rws.ConfigError, match="same engine"):
            rws.WeightSync.attach([engine_pool[0], engine_pool[1], engine_pool[0]])

    def test_the_same_engine_under_a_name_and_a_handle_is_refused(self) -> None:
        engine = rws.TorchEngine.options(name="twice").remote(make_module)
        with pytest.raises(rws.AttachError, match="same engine"):
            rws.WeightSync.attach([engine, "twice"])
        ray.kill(engine)

    def test_a_client_with_a_token_in_it_is_not_sent_to_the_coordinator(self) -> None:
        client = rws.HTTPVLLMWeightSyncClient("https://h", api_key="s3cret")
        with pytest.raises(rws.ConfigError, match="does not leave its process") as raised:
            rws.WeightSync.attach([client], name="keyed")
        assert "s3cret" not in str(raised.value)
        with pytest.raises(rws.AttachError, match="No session named 'keyed' is running"):
            find_coordinator("keyed")

    def test_a_variable_that_the_coordinator_does_not_have_is_named(self) -> None:
        with pytest.raises(rws.AttachError, match="the environment variable RWS_TEST_NO_KEY"):
            rws.WeightSync.attach([rws.EngineRef("https://h", api_key="env:RWS_TEST_NO_KEY")])

    def test_an_actor_that_is_no_engine_is_refused_by_what_it_lacks(self, engine_pool: list[Any]) -> None:
        actor = NoEngine.remote()
        with pytest.raises(rws.AttachError, match="r1"):
            rws.WeightSync.attach([engine_pool[0], actor])
        ray.kill(actor)

    def test_an_actor_that_lacks_one_verb_is_refused_naming_it(self) -> None:
        actor = HalfEngine.remote()
        with pytest.raises(rws.AttachError, match="update_weights"):
            rws.WeightSync.attach([actor])
        ray.kill(actor)

    def test_a_dead_engine_is_refused_within_seconds(self, engine_pool: list[Any]) -> None:
        engine = rws.TorchEngine.remote(make_module)
        ray.get(engine.get_weight_version.remote(), timeout=LIMIT_S)
        ray.kill(engine)
        with pytest.raises(rws.AttachError, match="dead"):
            rws.WeightSync.attach([engine_pool[0], engine])

    def test_a_name_that_nobody_has_is_refused(self) -> None:
        with pytest.raises(rws.AttachError, match=r"(?s)nobody-has-this.*a server's URL begins with http://"):
            rws.WeightSync.attach(["nobody-has-this"])

    def test_a_second_session_of_the_same_name_is_refused(self, start_fleet: StartFleet) -> None:
        fleet = start_fleet(1)
        with pytest.raises(rws.SessionConflict, match=fleet.sync.name):
            rws.WeightSync.attach(fleet.engines, name=fleet.sync.name)
        fleet.sync.send_weights(make_module(), version=1)

    def test_an_update_that_another_client_left_open_is_named_and_flushed_only_on_request(self, start_fleet: StartFleet) -> None:
        fleet = start_fleet(1)
        fleet.sync.close()
        client = rws.RayVLLMWeightSyncClient(fleet.engines)
        client.pause_generation()
        client.start_weight_update()
        with pytest.raises(rws.AttachError, match="take_over"):
            rws.WeightSync.attach(fleet.engines)
        module = make_module()
        with rws.WeightSync.attach(fleet.engines, take_over=True) as sync:
            assert [each.state for each in sync.status().replicas] == ["QUARANTINED"]
            sync.send_weights(module, version=1)
            assert fleet.serve(module)

    @pytest.mark.parametrize(
        "options",
        [
            {"pause": "sometimes"},
            {"cache": "maybe"},
            {"preflight": "off"},
            {"adopt": "always"},
            {"transport": "pigeon"},
            {"name": "a name with spaces"},
            {"timeouts": 60},
            {"on_failure": "ignore"},
            {"trainers": [object()]},
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_a_wrong_option_is_refused(self, engine_pool: list[Any], options: dict[str, Any]) -> None:
        with pytest.raises(rws.ConfigError):
            rws.WeightSync.attach(engine_pool[:1], **options)


def wrong_shape(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = dict(module.state_dict())
    state["0.weight"] = torch.zeros(16, 128)
    return state


def unknown_name(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**module.state_dict(), "3.weight": torch.zeros(2)}


def missing_name(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = dict(module.state_dict())
    del state["2.bias"]
    return state


def wrong_dtype(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = dict(module.state_dict())
    state["2.bias"] = state["2.bias"].to(torch.float16)
    return state


class Twice:
    """Declares and yields one name twice."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._pairs = [*module.state_dict().items(), ("0.bias", module.state_dict()["0.bias"])]

    def metadata(self) -> list[Any]:
        return [rws.ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._pairs]

    def __iter__(self) -> Any:
        return iter(self._pairs)


class Liar:
    """Yields other shapes than it declares."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._state = dict(module.state_dict())

    def metadata(self) -> list[Any]:
        return [rws.ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._state.items()]

    def __iter__(self) -> Any:
        return ((name, tensor.flatten()[:1] if name == "2.weight" else tensor) for name, tensor in self._state.items())


class Raises:
    """A source whose second tensor cannot be had."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._state = dict(module.state_dict())

    def metadata(self) -> list[Any]:
        return [rws.ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._state.items()]

    def __iter__(self) -> Any:
        for place, pair in enumerate(self._state.items()):
            if place == 1:
                raise RuntimeError("out of memory on the second tensor")
            yield pair


@pytest.mark.parametrize("overlap", [False, True], ids=["staged", "overlap"])
@pytest.mark.parametrize(
    ("make_source", "error", "words"),
    [
        (wrong_shape, rws.RoundAborted, "0.weight"),
        (unknown_name, rws.RoundAborted, "3.weight"),
        (missing_name, rws.RoundAborted, "2.bias"),
        (wrong_dtype, rws.RoundAborted, "2.bias"),
        (Twice, rws.ConfigError, "0.bias"),
    ],
    ids=["wrong shape", "unknown name", "missing name", "wrong dtype", "duplicate name"],
)
def test_a_plan_that_an_engine_refuses_changes_nothing(
    start_fleet: StartFleet, make_source: Any, error: type[Exception], words: str, overlap: bool
) -> None:
    fleet = start_fleet(2, transport=rws.Host(overlap=overlap))
    served = make_module()
    fleet.sync.send_weights(served, version="good")
    with pytest.raises(error, match=words):
        fleet.sync.send_weights(make_source(make_module()), version="bad")
    assert fleet.serve(served)
    assert fleet.versions() == ["good", "good"]
    assert fleet.paused() == [False, False]
    after = make_module()
    fleet.sync.send_weights(after, version="next")
    assert fleet.serve(after)


@pytest.mark.parametrize(
    ("make_source", "error", "words"), [(Liar, rws.ConfigError, "2.weight"), (Raises, rws.RoundAborted, "second tensor")]
)
def test_a_source_that_fails_while_it_is_read_changes_nothing(
    start_fleet: StartFleet, make_source: Any, error: type[Exception], words: str
) -> None:
    fleet = start_fleet(2)
    served = make_module()
    fleet.sync.send_weights(served, version="good")
    with pytest.raises(error, match=words):
        fleet.sync.send_weights(make_source(make_module()), version="bad")
    assert fleet.serve(served)
    assert fleet.versions() == ["good", "good"]
    after = make_module()
    fleet.sync.send_weights(after, version="bad")
    assert fleet.serve(after), "a version that was not committed may be used again"


@pytest.mark.parametrize("version", ["", None, 1.5, True, "x" * 300, "a\nb", "!rws:abc"], ids=repr)
def test_an_invalid_version_is_refused_before_anything_is_asked(start_fleet: StartFleet, version: Any) -> None:
    fleet = start_fleet(1)
    with pytest.raises(rws.ConfigError, match="version"):
        fleet.sync.send_weights(make_module(), version=version)
    assert fleet.sync.status().epoch == 0


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ({"rank": 1}, "rank must be in 0 .. world_size - 1 = 0, not 1"),
        ({"rank": -1, "world_size": 2}, "rank must be in 0 .. world_size - 1 = 1, not -1"),
        ({"rank": 0, "world_size": 2}, "gather on rank 0 and send from there"),
        ({"rank": 1, "world_size": 2}, "gather on rank 0 and send from there"),
        ({"process_group": object()}, "gather on rank 0 and send from there"),
        ({"rank": True}, "must be ints"),
    ],
)
def test_a_second_sender_or_none_of_rank_0_is_refused_before_any_session_is_looked_for(ranks: dict[str, Any], words: str) -> None:
    with pytest.raises(rws.ConfigError) as caught:
        rws.WeightSender("no such session", make_module(), **ranks)
    assert words in str(caught.value)


@pytest.mark.parametrize("source", [None, 3, "weights", {}, {"a": 3}, (pair for pair in [("a", torch.zeros(1))])], ids=repr)
def test_what_is_no_source_is_refused(start_fleet: StartFleet, source: Any) -> None:
    fleet = start_fleet(1)
    with pytest.raises(rws.ConfigError):
        fleet.sync.send_weights(source, version=1)
    assert fleet.versions() == ["default"]


def test_no_shared_memory_left_is_said_with_the_bytes_and_changes_nothing(start_fleet: StartFleet) -> None:
    fleet = start_fleet(1)
    served = make_module()
    fleet.sync.send_weights(served, version="good")

    class Huge:
        """Declares more than any machine's shared memory holds; nothing of it is ever made."""

        def metadata(self) -> list[Any]:
            return [rws.ParamMeta("weight", torch.uint8, (1 << 45,))]

        def __iter__(self) -> Any:
            raise AssertionError("never asked")

    with pytest.raises(rws.RoundAborted, match="No room") as caught:
        fleet.sync.send_weights(Huge(), version="huge")
    assert "/dev/shm" in str(caught.value)
    assert fleet.serve(served)
    fleet.sync.send_weights(make_module(), version="next")
