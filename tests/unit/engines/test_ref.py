"""What can be attached, and what is refused by looking at it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import ray
from ray import cloudpickle

from ray_weightsync.engines.ref import EngineRef, as_ref, as_refs, kind_of, literal_keys, shown, with_keys
from ray_weightsync.engines.torch_engine import TorchEngine
from ray_weightsync.errors import ConfigError
from ray_weightsync.protocol.urls import Secret


class Client:
    """A `VLLMWeightSyncClient` by its methods."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: Any) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class TestEngineRef:
    @pytest.mark.parametrize(
        ("target", "kind"), [("http://h:1", "url"), ("HTTPS://h", "url"), ("gen-0", "name"), ("a:b", "name"), (Client(), "client")]
    )
    def test_a_string_with_a_scheme_is_a_url_and_any_other_a_name(self, target: Any, kind: str) -> None:
        assert kind_of(EngineRef(target).target) == kind

    @pytest.mark.parametrize("target", [TorchEngine, ray.remote(Client)])
    def test_an_actor_class_is_no_client_although_it_has_the_methods_and_the_error_says_remote(self, target: Any) -> None:
        with pytest.raises(ConfigError, match=r"start it with \.remote\(\) and pass the handle"):
            EngineRef(target)

    @pytest.mark.parametrize("target", [None, 7, object(), Client, ["http://h"], {"url": "x"}])
    def test_anything_else_is_refused(self, target: Any) -> None:
        with pytest.raises(ConfigError, match="an engine must be an actor handle, an actor's name, a URL"):
            EngineRef(target)

    @pytest.mark.parametrize(
        ("target", "fields", "named"),
        [
            ("", {}, "target"),
            ("gen", {"attr": "a b"}, "attr"),
            ("gen", {"attr": ""}, "attr"),
            ("gen", {"attr": "llm."}, "attr"),
            ("gen", {"id": ""}, "id"),
            ("gen", {"id": "a,b"}, "id"),
            ("gen", {"id": "a\nb"}, "id"),
            ("gen", {"world_size": 0}, "world_size"),
            ("gen", {"world_size": True}, "world_size"),
            ("gen", {"world_size": 2.0}, "world_size"),
            ("gen", {"namespace": ""}, "namespace"),
            ("gen", {"deployment": 1}, "deployment"),
            ("http://h", {"verify": ""}, "verify"),
            ("http://h", {"verify": None}, "verify"),
            ("http://h", {"api_key": ""}, "api_key"),
            ("http://h", {"api_key": 7}, "api_key"),
            ("http://h", {"api_key": "env:"}, "api_key"),
            ("http://h", {"api_key": "env:two words"}, "api_key"),
        ],
    )
    def test_a_wrong_field_is_named(self, target: str, fields: dict[str, Any], named: str) -> None:
        with pytest.raises(ConfigError, match=rf"EngineRef\.{named}"):
            EngineRef(target, **fields)

    @pytest.mark.parametrize(
        ("target", "fields", "why"),
        [
            ("http://h", {"attr": "llm"}, "attr means nothing for a URL"),
            ("http://h", {"namespace": "n"}, "namespace means nothing for a URL"),
            ("gen", {"api_key": "env:K"}, "api_key means nothing for an actor's name"),
            ("gen", {"verify": False}, "verify means nothing for an actor's name"),
            (Client(), {"attr": "llm"}, "attr means nothing for a client of your own"),
        ],
    )
    def test_a_field_that_means_nothing_for_its_target_is_refused(self, target: Any, fields: dict[str, Any], why: str) -> None:
        with pytest.raises(ConfigError, match=why):
            EngineRef(target, **fields)

    @pytest.mark.parametrize("url", ["ftp://h", "http://", "http://user:pass@h", "http://h:0", "http://h?x=1"])
    def test_an_unusable_url_is_refused_when_it_is_given(self, url: str) -> None:
        with pytest.raises(ConfigError) as raised:
            EngineRef(url)
        assert "pass" not in str(raised.value)

    def test_a_token_itself_is_accepted_and_shown_nowhere(self) -> None:
        ref = EngineRef("http://h", api_key="s3cret")
        for each in (ref, as_refs([ref])[0]):
            assert "s3cret" not in f"{each} {each!r} {each.api_key} {each.api_key!r} {shown(each)} {dataclasses.asdict(each)}"

    @pytest.mark.parametrize("key", ["two words", "s3cr\u00e9t", "s3cret\n"])
    def test_a_wrong_token_is_refused_and_not_repeated(self, key: str) -> None:
        with pytest.raises(ConfigError, match=r"EngineRef\.api_key must be") as raised:
            EngineRef("http://h", api_key=key)
        assert key not in str(raised.value)

    @pytest.mark.parametrize("pickled", [pickle.dumps, cloudpickle.dumps])
    def test_a_token_itself_stays_behind_when_the_reference_travels(self, pickled: Callable[[Any], bytes]) -> None:
        ref = EngineRef("http://h", id="gen", api_key="s3cret")
        sent = pickled([ref])
        assert b"s3cret" not in sent
        (arrived,) = pickle.loads(sent)
        assert isinstance(arrived.api_key, Secret)
        with pytest.raises(ConfigError, match="did not travel with the reference") as raised:
            _ = arrived.api_key.value
        assert "env:NAME" in str(raised.value)
        assert with_keys([arrived], literal_keys([ref])) == (ref,)

    def test_only_tokens_given_themselves_travel_apart(self) -> None:
        refs = as_refs([EngineRef("http://a", api_key="s3cret"), EngineRef("http://b", api_key="env:K"), "http://c", "gen"])
        assert literal_keys(refs) == {"r0": "s3cret"}
        assert with_keys(refs, {}) == refs

    def test_a_copy_keeps_its_token(self) -> None:
        ref = EngineRef("http://h", api_key="s3cret")
        assert copy.copy(ref) == copy.deepcopy(ref) == dataclasses.replace(ref) == ref != EngineRef("http://h", api_key="other")

    def test_the_name_of_a_variable_travels_and_its_value_does_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RWS_TEST_KEY", "s3cret")
        ref = EngineRef("http://h", api_key="env:RWS_TEST_KEY")
        pickled = pickle.dumps(ref)
        assert b"s3cret" not in pickled
        assert pickle.loads(pickled) == ref
        assert "s3cret" not in f"{ref} {ref!r} {shown(ref)}"

    def test_it_is_frozen(self) -> None:
        with pytest.raises(AttributeError):
            EngineRef("gen").id = "x"  # type: ignore[misc]

    def test_a_dotted_attr_is_accepted(self) -> None:
        assert EngineRef("gen", attr="server.llm").attr == "server.llm"

    def test_as_ref_leaves_a_ref_as_it_is(self) -> None:
        ref = EngineRef("gen", id="x")
        assert as_ref(ref) is ref
        assert as_ref("gen") == EngineRef("gen")


class TestAsRefs:
    def test_no_engines_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="there is nothing to send weights to"):
            as_refs([])

    def test_the_place_of_a_wrong_one_is_said(self) -> None:
        with pytest.raises(ConfigError, match=r"engines\[1\]: an engine must be"):
            as_refs(["gen", 5])  # type: ignore[list-item]

    def test_one_engine_is_a_list_of_one(self) -> None:
        assert [ref.id for ref in as_refs("gen-0")] == ["gen-0"]

    def test_names_are_ids_and_the_others_are_numbered(self) -> None:
        refs = as_refs(["http://a", "gen", EngineRef("http://b", id="mine"), "http://c", Client()])
        assert [ref.id for ref in refs] == ["r0", "gen", "mine", "r1", "r2"]

    def test_numbers_step_around_ids_that_are_taken(self) -> None:
        refs = as_refs(["http://a", EngineRef("http://b", id="r0"), "http://c"], taken={"r1", "r2"})
        assert [ref.id for ref in refs] == ["r3", "r0", "r4"]

    def test_an_id_given_twice_or_taken_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"engines\[0\] and engines\[1\] have the same id 'x'"):
            as_refs([EngineRef("http://a", id="x"), EngineRef("http://b", id="x")])
        with pytest.raises(ConfigError, match=r"engines\[0\] has the id 'gen', which another replica"):
            as_refs(["gen"], taken={"gen"})

    @pytest.mark.parametrize(
        "engines",
        [
            ["gen", "gen"],
            ["http://host:80/", "HTTP://HOST"],
            ["http://h:8000//v//", EngineRef("http://h:8000/v", id="other")],
            [EngineRef("gen", attr="llm"), EngineRef("gen", attr="llm", id="other")],
            [one := Client(), one],
        ],
    )
    def test_the_same_engine_twice_is_refused_naming_both_places(self, engines: list[Any]) -> None:
        with pytest.raises(ConfigError, match=r"engines\[0\] and engines\[1\] are the same engine"):
            as_refs(engines)

    def test_two_engines_of_one_actor_are_two(self) -> None:
        refs = as_refs([EngineRef("gen", attr="a", id="a"), EngineRef("gen", attr="b", id="b")])
        assert [ref.attr for ref in refs] == ["a", "b"]
