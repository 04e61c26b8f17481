"""What a user attaches: a handle, an actor's name, a URL or a client, and what the user knows about it.

Nothing here talks to an engine. A list of engines is checked for what can be told by looking: wrong types, none at all, the same one twice.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from ray_weightsync.errors import ConfigError
from ray_weightsync.protocol.client import VLLMWeightSyncClient
from ray_weightsync.protocol.urls import Secret, as_secret, base_url

if TYPE_CHECKING:
    from ray.actor import ActorHandle

Target: TypeAlias = Union["ActorHandle[Any]", str, VLLMWeightSyncClient]
EngineLike: TypeAlias = Union["EngineRef", Target]

_ID = re.compile(r"[^\x00-\x1f\x7f,\s]{1,128}")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class EngineRef:
    """One engine, and how to reach it.

    Attributes:
        target: An actor handle, a URL of a vLLM server (a str with a scheme), an actor's name (any other str), or a `VLLMWeightSyncClient`.
        attr: Where the actor holds its engine, such as ``"llm"`` or ``"server.llm"``; by default the actor itself, if it has the
            protocol's methods, else its ``"llm"``.
        id: The replica's id in reports and errors; by default the actor's name, or ``r0``, ``r1``, ...
        namespace: Ray namespace of a named actor; by default the one of the process that attaches.
        world_size: Workers you expect behind it (TP x PP x DP). The engine is believed; a difference is an error that says both.
        deployment: Name shared by engines that are data-parallel parts of one deployment.
        api_key: A server's bearer token, or ``"env:NAME"``: it is in the environment variable NAME of the process that makes the requests,
            in a session the coordinator (an actor has the environment in which Ray was started). A token given itself is shown nowhere,
            and stays behind when the reference is pickled: `WeightSync` hands it over apart. A coordinator that has to be started anew
            without the session's process can only read a variable.
        verify: TLS verification of a server: True, False, or the path of a CA bundle.

    Raises:
        ConfigError: naming the field.
    """

    target: Target
    attr: str | None = field(default=None, kw_only=True)
    id: str | None = field(default=None, kw_only=True)
    namespace: str | None = field(default=None, kw_only=True)
    world_size: int | None = field(default=None, kw_only=True)
    deployment: str | None = field(default=None, kw_only=True)
    api_key: str | Secret | None = field(default=None, kw_only=True)
    verify: bool | str = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        kind = kind_of(self.target)
        if isinstance(self.target, str) and not self.target.strip():
            raise ConfigError("EngineRef.target must not be an empty string")
        if self.attr is not None and not all(part.isidentifier() for part in str(self.attr).split(".")):
            raise ConfigError(f"EngineRef.attr must be the name of an attribute, such as 'llm' or 'server.llm', not {self.attr!r}")
        if self.id is not None and (not isinstance(self.id, str) or not _ID.fullmatch(self.id)):
            raise ConfigError(f"EngineRef.id must be 1 to 128 characters without spaces, commas or control characters, not {self.id!r}")
        size = self.world_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(f"EngineRef.world_size must be None or an int of at least 1, not {size!r}")
        for name in ("namespace", "deployment"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"EngineRef.{name} must be None or a non-empty str, not {value!r}")
        if not isinstance(self.verify, bool | str) or self.verify == "":
            raise ConfigError(f"EngineRef.verify must be True, False or the path of a CA bundle, not {self.verify!r}")
        misplaced = {
            "attr": self.attr is not None and kind not in ("handle", "name"),
            "namespace": self.namespace is not None and kind != "name",
            "api_key": self.api_key is not None and kind != "url",
            "verify": self.verify is not True and kind != "url",
        }
        for name, wrong in misplaced.items():
            if wrong:
                raise ConfigError(f"EngineRef.{name} means nothing for {_KINDS[kind]}")
        if kind == "url":
            normalised_url(self)
            object.__setattr__(self, "api_key", as_secret("EngineRef.api_key", self.api_key))

    def __getstate__(self) -> dict[str, Any]:
        key = self.api_key
        return {**self.__dict__, "api_key": Secret.left_behind() if isinstance(key, Secret) and key.is_literal else key}

    def __copy__(self) -> EngineRef:
        return self

    def __deepcopy__(self, memo: object) -> EngineRef:
        return self


_KINDS = {"handle": "an actor handle", "name": "an actor's name", "url": "a URL", "client": "a client of your own"}


def kind_of(target: object) -> str:
    """Which of the four kinds of target it is: ``"handle"``, ``"name"``, ``"url"`` or ``"client"``.

    Raises:
        ConfigError: if it is none.
    """
    if isinstance(target, str):
        return "url" if _SCHEME.match(target) else "name"
    if is_handle(target):
        return "handle"
    if not isinstance(target, type) and not _is_actor_class(target) and isinstance(target, VLLMWeightSyncClient):
        return "client"
    kinds = "an actor handle, an actor's name, a URL, an EngineRef or a VLLMWeightSyncClient"
    raise ConfigError(f"an engine must be {kinds}, not {_typed(target)}")


def is_handle(target: object) -> bool:
    """Whether ``target`` is a Ray actor handle. By the names in its class hierarchy: whoever holds one has imported Ray already."""
    return any(cls.__module__ == "ray.actor" and cls.__name__ == "ActorHandle" for cls in type(target).__mro__)


def as_ref(engine: EngineLike) -> EngineRef:
    """``engine`` as an `EngineRef`.

    Raises:
        ConfigError: if it is nothing that can be attached.
    """
    return engine if isinstance(engine, EngineRef) else EngineRef(engine)


def as_refs(engines: EngineLike | Iterable[EngineLike], *, taken: Container[str] = ()) -> tuple[EngineRef, ...]:
    """References with an id each, none of them twice. Named actors are looked for in this process's namespace, unless they say another.

    Args:
        engines: One engine, or several.
        taken: Ids of replicas that exist already.

    Raises:
        ConfigError: if there are none, one is of a wrong type, or two are the same engine or have the same id; it says which.
    """
    given: Iterable[Any] = (
        engines if isinstance(engines, Iterable) and not isinstance(engines, str) and not is_handle(engines) else (engines,)
    )
    refs = []
    for place, engine in enumerate(given):
        try:
            refs.append(_in_namespace(as_ref(engine)))
        except ConfigError as error:
            raise ConfigError(f"engines[{place}]: {error.message}") from error
    if not refs:
        raise ConfigError("engines is empty: there is nothing to send weights to")
    seen: dict[Any, int] = {}
    for place, ref in enumerate(refs):
        if (first := seen.setdefault(_same(ref), place)) != place:
            raise ConfigError(f"engines[{first}] and engines[{place}] are the same engine: {shown(ref)}")
    return _with_ids(refs, taken)


def _in_namespace(ref: EngineRef) -> EngineRef:
    """The reference with the namespace that its name is looked up in: whoever resolves it may live in another."""
    ray = sys.modules.get("ray")
    if kind_of(ref.target) != "name" or ref.namespace is not None or ray is None or not ray.is_initialized():
        return ref
    return replace(ref, namespace=ray.get_runtime_context().namespace)


def _with_ids(refs: Sequence[EngineRef], taken: Container[str]) -> tuple[EngineRef, ...]:
    chosen = [ref.id or _name_as_id(ref.target) for ref in refs]
    used: dict[str, int] = {}
    for place, name in enumerate(chosen):
        if name is None:
            continue
        if name in taken:
            raise ConfigError(f"engines[{place}] has the id {name!r}, which another replica of this session has; set EngineRef(id=...)")
        if (first := used.setdefault(name, place)) != place:
            raise ConfigError(f"engines[{first}] and engines[{place}] have the same id {name!r}; set EngineRef(id=...)")
    numbered = []
    number = 0
    for ref, name in zip(refs, chosen, strict=True):
        while name is None:
            name = None if f"r{number}" in used or f"r{number}" in taken else f"r{number}"
            number += 1
        numbered.append(replace(ref, id=name))
    return tuple(numbered)


def _name_as_id(target: Target) -> str | None:
    return target if isinstance(target, str) and kind_of(target) == "name" and _ID.fullmatch(target) else None


def _same(ref: EngineRef) -> Any:
    """Equal for references that plainly lead to the same engine. What can only be told by asking is found when they are resolved."""
    kind = kind_of(ref.target)
    if kind == "url":
        return (kind, normalised_url(ref))
    if kind == "name":
        return (kind, ref.namespace, ref.target, ref.attr)
    if kind == "handle":
        return (kind, ref.target, ref.attr)  # handles are equal if their actor ids are
    return (kind, id(ref.target))


def literal_keys(refs: Iterable[EngineRef]) -> dict[str, str]:
    """The tokens that were given themselves, by replica id: what has to travel apart from the references."""
    return {str(ref.id): ref.api_key.value for ref in refs if isinstance(ref.api_key, Secret) and ref.api_key.is_literal}


def with_keys(refs: Iterable[EngineRef], keys: Mapping[str, str]) -> tuple[EngineRef, ...]:
    """The references with the tokens that stayed behind, as `literal_keys` took them out."""
    return tuple(replace(ref, api_key=keys[str(ref.id)]) if ref.id in keys else ref for ref in refs)


def normalised_url(ref: EngineRef) -> str:
    """The server's base URL, in the one form that its channel uses.

    Raises:
        ConfigError: if it is not a usable http(s) URL.
    """
    return base_url(str(ref.target))


def shown(ref: EngineRef) -> str:
    """The target in words, without anything secret."""
    kind = kind_of(ref.target)
    if kind == "url":
        return normalised_url(ref)
    where = f", attribute {ref.attr!r}" if ref.attr else ""
    if kind == "name":
        return f"actor {ref.target!r}{f' in namespace {ref.namespace!r}' if ref.namespace else ''}{where}"
    return f"{ref.target!r}{where}" if kind == "handle" else f"client {type(ref.target).__name__}"


def _typed(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    hint = " (an actor class; start it with .remote() and pass the handle)" if _is_actor_class(value) else ""
    return f"{type(value).__name__}{hint}"


def _is_actor_class(value: object) -> bool:
    return type(value).__name__.startswith("ActorClass")
