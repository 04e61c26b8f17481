"""What is read inside an engine's process, on fakes that record every call."""

from __future__ import annotations

import asyncio
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

from ray_weightsync.engines.facts import DESCRIBE, facts_of
from ray_weightsync.engines.mixin import EngineMixin
from ray_weightsync.engines.told import at_once, has_extension, look, read, tell
from ray_weightsync.engines.vllm_args import WORKER_EXTENSION
from ray_weightsync.protocol import remote
from ray_weightsync.protocol.channel import REQUIRED_VERBS


def config(*, backend: str | None = "rws", extension: str = WORKER_EXTENSION, tensor: int = 2, **parallel: Any) -> SimpleNamespace:
    sizes = {
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "data_parallel_index": 0,
        "world_size": tensor,
    }
    transfer = SimpleNamespace(backend=backend) if backend else None
    kv = SimpleNamespace(kv_connector="Shelf")
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**sizes, "worker_extension_cls": extension, **parallel}),
        weight_transfer_config=transfer,
        kv_transfer_config=kv,
        instance_id="i-1",
    )


class Recording:
    """Records every call; answers or raises as it was told."""

    def __init__(self, vllm_config: Any = None, **answers: Any) -> None:
        self.calls: list[Any] = []
        self._answers = {"is_paused": False, "get_weight_version": "default", **answers}
        if vllm_config is not None:
            self.vllm_config = vllm_config

    def _answer(self, verb: str, *args: Any) -> Any:
        self.calls.append((verb, *args) if args else verb)
        answer = self._answers.get(verb)
        if isinstance(answer, Exception):
            raise answer
        return answer


class FakeAsync(Recording):
    async def init_weight_transfer_engine(self, request: Any) -> None: ...
    async def start_weight_update(self) -> None: ...
    async def update_weights(self, request: Any) -> None: ...
    async def finish_weight_update(self, weight_version: str | None = None) -> None: ...
    async def is_paused(self) -> Any:
        return self._answer("is_paused")

    async def get_weight_version(self) -> Any:
        return self._answer("get_weight_version")

    async def collective_rpc(self, method: str, timeout: Any = None, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self._answer("collective_rpc", method, timeout, args)
        answer = self._answers["collective_rpc"]
        return answer(*args) if callable(answer) else answer

    def get_num_unfinished_requests(self) -> int:
        return 3


class FakeSync(Recording):
    def __init__(self, vllm_config: Any = None, **answers: Any) -> None:
        super().__init__(None, **answers)
        self.llm_engine = SimpleNamespace(vllm_config=vllm_config)

    def init_weight_transfer_engine(self, request: Any) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, request: Any) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...
    def get_weight_version(self) -> Any:
        return self._answer("get_weight_version")

    def collective_rpc(self, method: str, timeout: Any = None, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self._answer("collective_rpc", method, timeout, args)
        return self._answers["collective_rpc"](*args)


def describing(ranks: int) -> Any:
    def answer(nonce: str) -> list[dict[str, Any]]:
        return [{"nonce": nonce, "rank": rank, "world_size": ranks, "package_version": "1"} for rank in range(ranks)]

    return answer


def looked(actor: Any, path: str = "") -> dict[str, Any]:
    return look(actor, path)


def asked(engine: Any) -> dict[str, Any]:
    return asyncio.run(read(engine, looked(engine), "n"))


class TestLook:
    def test_looking_calls_nothing(self) -> None:
        engine = FakeAsync(config())
        told = looked(SimpleNamespace(llm=engine), "llm")
        assert engine.calls == []
        assert told["kind"] == "async"
        assert (told["num_workers"], told["tensor_parallel_size"], told["backend"]) == (2, 2, "rws")
        assert (told["instance_id"], told["kv_connector"], told["extension"]) == ("i-1", "Shelf", True)

    @pytest.mark.parametrize(
        "how", [{"data_parallel_external_lb": True}, {"data_parallel_hybrid_lb": True}, {"data_parallel_rank_local": 0}]
    )
    def test_other_data_parallel_engines_of_its_deployment_that_it_does_not_drive_are_told(self, how: dict[str, Any]) -> None:
        told = looked(FakeAsync(config(data_parallel_size=4, data_parallel_index=1, **how)))
        facts = facts_of({**told, "failed": {}}, "n")
        assert (facts.data_parallel_size, facts.data_parallel_index, facts.data_parallel_outside) == (4, 1, True)
        assert looked(FakeAsync(config(data_parallel_size=4)))["data_parallel_outside"] is False

    def test_a_synchronous_llm_keeps_its_configuration_in_its_engine(self) -> None:
        told = looked(FakeSync(config(tensor=1)))
        assert (told["kind"], told["num_workers"]) == ("sync", 1)

    def test_an_actor_whose_methods_hand_on_is_read_through_the_one_engine_it_holds(self) -> None:
        class Handing(FakeAsync):
            def __init__(self) -> None:
                super().__init__()
                self.inner = FakeAsync(config(tensor=4))

        assert looked(Handing())["num_workers"] == 4

    def test_an_engine_without_a_configuration_shows_no_sizes(self) -> None:
        told = looked(FakeAsync())
        assert facts_of({**told, "failed": {}}, "n").world_size is None
        assert told["extension"] is False

    def test_what_is_no_engine_names_the_attributes_that_are(self) -> None:
        told = looked(SimpleNamespace(other=FakeAsync(), number=5))
        assert set(REQUIRED_VERBS) - set(told["verbs"])
        assert told["holders"] == ["other"]


class TestDevices:
    """Engines whose workers cannot be asked."""

    def stock(self, *, tensor: int = 1, executor: Any = "uni", backend: str = "ipc", kind: str | None = "cuda", **parallel: Any) -> Any:
        vllm_config = config(backend=backend, tensor=tensor, distributed_executor_backend=executor, **parallel)
        if kind is not None:
            vllm_config.device_config = SimpleNamespace(device_type=kind)
        return vllm_config

    @pytest.fixture
    def platform(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        module = types.ModuleType("vllm.platforms")
        module.current_platform = SimpleNamespace(get_device_uuid=lambda rank: f"GPU-{rank}")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "vllm.platforms", module)
        return module.current_platform  # type: ignore[no-any-return]

    def test_each_worker_is_on_the_gpu_that_vllm_gives_its_rank(self, platform: SimpleNamespace) -> None:
        told = looked(FakeAsync(self.stock(tensor=2, executor="mp")))
        assert told["devices"] == [{"type": "cuda", "uuid": "GPU-0"}, {"type": "cuda", "uuid": "GPU-1"}]
        assert [device.uuid for device in facts_of({**told, "failed": {}}, "n").devices] == ["0", "1"]

    def test_a_platform_that_does_not_tell_leaves_the_kind_of_device(self, platform: SimpleNamespace) -> None:
        def refuse(rank: int) -> str:
            raise NotImplementedError

        platform.get_device_uuid = refuse
        assert looked(FakeAsync(self.stock(kind="cpu")))["devices"] == [{"type": "cpu", "uuid": None}]

    @pytest.mark.parametrize(
        "changes", [{"executor": "ray"}, {"executor": None}, {"executor": type}, {"data_parallel_size": 2}, {"kind": None}]
    )
    def test_workers_that_may_be_elsewhere_are_not_told_of(self, platform: SimpleNamespace, changes: dict[str, Any]) -> None:
        assert looked(FakeAsync(self.stock(**changes)))["devices"] is None

    def test_workers_that_can_be_asked_are_asked_instead(self, platform: SimpleNamespace) -> None:
        assert "devices" not in looked(FakeAsync(self.stock(backend="rws")))


class TestExtension:
    def test_ours_is_known_by_its_name(self) -> None:
        assert has_extension(WORKER_EXTENSION)

    def test_a_class_that_derives_from_ours_is_known_by_its_method(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = types.ModuleType("users_extension")
        module.Mine = type("Mine", (), {DESCRIBE: lambda self, nonce: {}})  # type: ignore[attr-defined]
        module.Other = type("Other", (), {})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "users_extension", module)
        assert has_extension("users_extension.Mine")
        assert not has_extension("users_extension.Other")

    @pytest.mark.parametrize("name", [None, "", "no_such_module.Class", "NoModule", ".", 5])
    def test_anything_else_is_not_believed_to_have_our_method(self, name: Any) -> None:
        assert not has_extension(name)


class TestRead:
    def test_an_engine_with_our_extension_is_asked_once_with_the_nonce_and_no_timeout(self) -> None:
        engine = FakeAsync(config(), collective_rpc=describing(2))
        facts = facts_of(asked(engine), "n")
        assert engine.calls == ["is_paused", "get_weight_version", ("collective_rpc", DESCRIBE, None, ("n",))]
        assert facts.in_step
        assert (facts.paused, facts.version, facts.unfinished_requests) == (False, "default", 3)

    @pytest.mark.parametrize("stock", [config(extension=""), config(backend=None), config(backend="nccl"), config(extension="their.Own")])
    def test_an_engine_that_may_lack_the_method_is_never_asked_for_it(self, stock: Any) -> None:
        engine = FakeAsync(stock, collective_rpc=RuntimeError("a missing method raises on every rank"))
        facts = facts_of(asked(engine), "n")
        assert engine.calls == ["is_paused", "get_weight_version"]
        assert facts.in_step
        assert facts.workers == ()

    def test_an_old_engine_without_the_questions_is_unknown_not_running_and_not_default(self) -> None:
        told = asked(FakeSync(config(backend=None)))
        assert facts_of(told, "n").paused is None

        class Old(FakeAsync):
            is_paused = None  # type: ignore[assignment]
            get_weight_version = None  # type: ignore[assignment]

        facts = facts_of(asked(Old(config(backend=None))), "n")
        assert (facts.paused, facts.version) == (None, None)

    def test_what_an_engine_raises_is_told_and_the_workers_are_left_alone(self) -> None:
        engine = FakeAsync(config(), is_paused=RuntimeError("the core is gone"), collective_rpc=describing(2))
        told = asked(engine)
        assert told["failed"]["is_paused"]["text"] == "the core is gone"
        assert engine.calls == ["is_paused", "get_weight_version"]


class TestTell:
    def ask(self, actor: Any, path: str = "llm") -> dict[str, Any] | None:
        return tell(actor, path, "token", "n", 10.0)

    def test_a_synchronous_engine_is_asked_without_taking_the_threads_event_loop_away(self) -> None:
        with asyncio.Runner() as runner:
            mine = runner.get_loop()
            asyncio.set_event_loop(mine)
            try:
                told = self.ask(SimpleNamespace(llm=FakeSync(config(tensor=1), collective_rpc=describing(1))))
                assert asyncio.get_event_loop() is mine
            finally:
                asyncio.set_event_loop(None)
        assert told is not None
        assert facts_of(told, "n").workers[0].rank == 0

    def test_a_synchronous_engine_beside_other_calls_is_not_called(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(remote, "concurrency", lambda: {"actor_is_async": True, "max_concurrency": 1000})
        engine = FakeSync(config(tensor=1))
        told = self.ask(SimpleNamespace(llm=engine))
        assert told is not None
        assert "failed" not in told
        assert engine.calls == []

    def test_an_asynchronous_engine_is_asked_on_its_own_loop(self) -> None:
        async def main() -> dict[str, Any] | None:
            engine = FakeAsync(config(), collective_rpc=describing(2))
            engine.output_handler = asyncio.create_task(asyncio.Event().wait())  # type: ignore[attr-defined]
            try:
                return await asyncio.to_thread(self.ask, SimpleNamespace(llm=engine))
            finally:
                engine.output_handler.cancel()  # type: ignore[attr-defined]

        told = asyncio.run(main())
        assert told is not None
        assert len(facts_of(told, "n").workers) == 2

    def test_an_asynchronous_engine_whose_loop_cannot_be_found_is_not_called(self) -> None:
        engine = FakeAsync(config())
        told = self.ask(SimpleNamespace(llm=engine))
        assert told is not None
        assert "failed" not in told
        assert engine.calls == []


def test_at_once_refuses_something_that_waits() -> None:
    async def waits() -> None:
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="something to be awaited"):
        at_once(waits())


def test_an_engine_that_was_not_made_yet_is_told_from_one_without_a_backend() -> None:
    class Lazy(EngineMixin):
        llm = None

    with pytest.raises(AttributeError, match="Lazy holds None in 'llm': attach it when its engine was made"):
        asyncio.run(Lazy().rws_inspect("n"))
