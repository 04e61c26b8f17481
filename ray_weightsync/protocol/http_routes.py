"""What is sent to a vLLM server for each verb, and the one answer that counts as success.

The routes and answers are those of vLLM's ``entrypoints/rl/online/api_router.py`` and ``entrypoints/serve/dev`` (0.28 to 0.32).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray_weightsync.config import require_choice
from ray_weightsync.errors import ConfigError
from ray_weightsync.protocol import channel as verbs
from ray_weightsync.protocol.messages import Payload, plain, plain_args

WEIGHT_INFO = "weight_info"
SERVER_INFO = "server_info"

NOTHING = object()
"""Stands for an empty body."""


class UnexpectedAnswer(Exception):
    """The answer is not the one expected; the text says what was."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One request, and how to read its answer.

    Attributes:
        method: ``"GET"`` for a read, which may be repeated; ``"POST"`` for anything else, which may not.
        path: Path below the base URL.
        read: Takes the parsed answer (`NOTHING` for an empty body), returns what the verb returns, raises `UnexpectedAnswer`.
        params: Query parameters; one with several values is given several times.
        body: JSON object of a POST.
    """

    method: str
    path: str
    read: Callable[[Any], Any]
    params: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None


def _field(name: str, kind: type | tuple[type, ...], *, allowed: object = NOTHING, give: bool = True) -> Callable[[Any], Any]:
    """A reader: the answer is an object whose ``name`` is of ``kind`` (and equal to ``allowed``, if given)."""

    def read(answer: Any) -> Any:
        value = answer.get(name, NOTHING) if isinstance(answer, dict) else NOTHING
        wrong_kind = not isinstance(value, kind) or (isinstance(value, bool) and kind is int)
        if wrong_kind or (allowed is not NOTHING and value != allowed):
            wanted = "..." if allowed is NOTHING else repr(allowed)
            raise UnexpectedAnswer(f"{{{name!r}: {wanted}}}")
        return value if give else None

    return read


def _empty(answer: Any) -> None:
    if answer is not NOTHING:
        raise UnexpectedAnswer("an empty body")


def _object(answer: Any) -> dict[str, Any]:
    if not isinstance(answer, dict) or not answer:
        raise UnexpectedAnswer("a JSON object")
    return answer


_done = _field("message", str, give=False)


def _init(init_info: Payload) -> Exchange:
    return _post("init_weight_transfer_engine", _done, {"init_info": plain(init_info, what="init_info")})


def _update(update_info: Payload) -> Exchange:
    return _post("update_weights", _done, {"update_info": plain(update_info, what="update_info")})


def _finish(weight_version: str | None = None) -> Exchange:
    return _post("finish_weight_update", _done, None if weight_version is None else {"weight_version": weight_version})


def _bare(path: str) -> Callable[[], Exchange]:
    return lambda: _post(path, _done)


def _pause(*, mode: str = "abort", clear_cache: bool = True) -> Exchange:
    require_choice("mode", mode, ("abort", "wait", "keep"))
    return _post("pause", _field("status", str, allowed="paused", give=False), params={"mode": mode, "clear_cache": _flag(clear_cache)})


def _resume() -> Exchange:
    return _post("resume", _field("status", str, allowed="resumed", give=False))


def _is_paused() -> Exchange:
    return _get("is_paused", _field("is_paused", bool))


def _get_version() -> Exchange:
    return _get("weight_info", _field("weight_version", (str, type(None))))


def _set_version(new_version: str) -> Exchange:
    read_success, read_version = _field("success", bool, allowed=True), _field("new_version", str, allowed=new_version)

    def read(answer: Any) -> None:
        read_success(answer)
        read_version(answer)

    return _post("update_weight_version", read, {"new_version": new_version})


def _sleep(level: int = 1) -> Exchange:
    return _post("sleep", _slept, params={"level": str(level)})


def _wake_up(tags: Sequence[str] | None = None) -> Exchange:
    return _post("wake_up", _slept, params={"tags": tuple(tags)} if tags else None)


def _slept(answer: Any) -> Any:
    """Whether it is awake or sleeps, in vLLM's words; nothing before 0.32."""
    return None if answer is NOTHING else _field("status", str)(answer)


def _world_size(include_dp: bool = True) -> Exchange:
    return _get("get_world_size", _field("world_size", int), params={"include_dp": _flag(include_dp)})


def _reset_prefix_cache(reset_running_requests: bool = False, reset_connector: bool = False) -> Exchange:
    params = {"reset_running_requests": _flag(reset_running_requests), "reset_external": _flag(reset_connector)}
    return _post("reset_prefix_cache", _field("success", bool), params=params)


def _collective_rpc(
    method: str, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Exchange:
    if not isinstance(method, str) or not method:
        raise ConfigError(f"collective_rpc over HTTP takes the name of a worker method, not {method!r}")
    if timeout is not None:
        # vLLM stops reading replies at the timeout; those left in the queue put every later reply one call behind.
        raise ConfigError("collective_rpc must not be given a timeout: it leaves an engine with several workers out of step for good")
    plain_list, plain_dict = plain_args(args, kwargs or {}, what="collective_rpc")
    return _post("collective_rpc", _field("results", list), {"method": method, "args": plain_list, "kwargs": plain_dict})


def _weight_info() -> Exchange:
    return _get("weight_info", _object)


def _server_info() -> Exchange:
    def read(answer: Any) -> dict[str, Any]:
        _field("vllm_config", dict)(answer)
        return _object(answer)

    return _get("server_info", read, params={"config_format": "json"})


def _reset_cache(path: str) -> Callable[[], Exchange]:
    return lambda: _post(path, _empty)


def _get(path: str, read: Callable[[Any], Any], params: Mapping[str, str] | None = None) -> Exchange:
    return Exchange(method="GET", path=path, read=read, params=params or {})


def _post(
    path: str,
    read: Callable[[Any], Any],
    body: Mapping[str, Any] | None = None,
    *,
    params: Mapping[str, str | Sequence[str]] | None = None,
) -> Exchange:
    return Exchange(method="POST", path=path, read=read, params=params or {}, body=body)


def _flag(value: bool) -> str:
    return "true" if value else "false"


ROUTES: Mapping[str, Callable[..., Exchange]] = {
    verbs.INIT: _init,
    verbs.START: _bare("start_weight_update"),
    verbs.START_DRAFT: _bare("start_draft_weight_update"),
    verbs.UPDATE: _update,
    verbs.FINISH: _finish,
    verbs.SHUTDOWN: _bare("shutdown_weight_transfer_engine"),
    verbs.PAUSE: _pause,
    verbs.RESUME: _resume,
    verbs.IS_PAUSED: _is_paused,
    verbs.GET_VERSION: _get_version,
    verbs.SET_VERSION: _set_version,
    verbs.RESET_PREFIX_CACHE: _reset_prefix_cache,
    verbs.COLLECTIVE_RPC: _collective_rpc,
    verbs.RESET_MM_CACHE: _reset_cache("reset_mm_cache"),
    verbs.RESET_ENCODER_CACHE: _reset_cache("reset_encoder_cache"),
    verbs.SLEEP: _sleep,
    verbs.WAKE_UP: _wake_up,
    verbs.WORLD_SIZE: _world_size,
    WEIGHT_INFO: _weight_info,
    SERVER_INFO: _server_info,
}
"""By verb, a function of vLLM's own arguments that gives the exchange. It raises before anything is sent."""
