"""What an exception says, and whether it means death. The classes here have the shapes of Ray's and vLLM's, which are known by name."""

from __future__ import annotations

import pickle

import pytest

from ray_weightsync.errors import ConfigError
from ray_weightsync.protocol.reading import MAX_WORDS, EngineRaised, EngineRestarted, died, words


class RayError(Exception): ...


class RayActorError(RayError): ...


class ActorDiedError(RayActorError): ...


class ActorUnavailableError(RayActorError): ...


class RayTaskError(RayError):
    def __init__(self, text: str, cause: BaseException | None) -> None:
        self.cause = cause
        super().__init__(text)


class UnserializableException(RayError): ...


class EngineDeadError(Exception): ...


TRACE = """\x1b[36mray::Engine.start()\x1b[39m (pid=1, ip=10.0.0.1)
  File "engine.py", line 3, in start
    raise ValueError("first")
ValueError: first

During handling of the above exception, another exception occurred:

\x1b[36mray::Engine.start()\x1b[39m (pid=1, ip=10.0.0.1)
  File "engine.py", line 5, in start
    raise KeyError
        ^^^^^^
RuntimeError: no such layer:
  model.layers.0"""

WORKER = "Worker failed with error 'no 'op' in layer\n3', please check the stack trace above for the root cause"


@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError("gone"),
        ActorUnavailableError("socket closed"),
        EngineDeadError("core"),
        RayTaskError(TRACE, EngineDeadError("core")),
        EngineRaised("vllm.v1.engine.exceptions.EngineDeadError", ["EngineDeadError", "Exception"], "core"),
        EngineRestarted("another process"),
        UnserializableException('Original exception:\n  File "a.py", line 1, in f\n    x\nvllm.v1.engine.exceptions.EngineDeadError: core'),
    ],
)
def test_a_process_that_is_gone_is_dead(error: BaseException) -> None:
    assert died(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        ConnectionRefusedError("x"),
        TimeoutError(),
        RayTaskError(TRACE, ValueError("x")),
        RayTaskError(TRACE, ActorDiedError("an actor that the engine called")),
        EngineRaised("ray.exceptions.ActorDiedError", ["ActorDiedError", "RayActorError"], "an actor that the engine called"),
        UnserializableException('Original exception:\n  File "a.py", line 1, in f\n    EngineDeadError\nValueError: x'),
    ],
)
def test_an_engine_that_answered_is_not_dead(error: BaseException) -> None:
    assert not died(error)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no luck"), "ValueError: no luck"),
        (ValueError(), "ValueError"),
        (RayTaskError(TRACE, ValueError("no luck")), "ValueError: no luck"),
        (RayTaskError(TRACE, RayTaskError(TRACE, KeyError("a"))), "KeyError: 'a'"),
        (RayTaskError(TRACE, None), "RuntimeError: no such layer:\n  model.layers.0"),
        (RuntimeError(TRACE), "RuntimeError: no such layer:\n  model.layers.0"),
        (UnserializableException(TRACE), "RuntimeError: no such layer:\n  model.layers.0"),
        (ActorDiedError("The actor died.\n\tclass_name: A\n\tpid: 7\nIt was killed."), "The actor died. It was killed."),
        (EngineRaised("a.b.PickyError", ["PickyError"], "this"), "PickyError: this"),
        (ConfigError("wrong"), "wrong"),
        (RayTaskError(TRACE, Exception(f"Call to collective_rpc method failed: {WORKER}")), "no 'op' in layer\n3"),
        (EngineRaised("builtins.Exception", ["Exception"], WORKER), "no 'op' in layer\n3"),
    ],
)
def test_the_words_are_the_engines_own_without_traceback_or_colours(error: BaseException, said: str) -> None:
    assert words(error) == said


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    said = words(ValueError("a" * 5000 + "the end"))
    assert said.startswith("ValueError: aaa")
    assert said.endswith("the end")
    assert len(said) < MAX_WORDS + 20


def test_what_an_engine_raised_survives_a_pickle() -> None:
    error = EngineRaised("a.B", ["B", "Exception"], "text", "trace")
    again = pickle.loads(pickle.dumps(error))
    assert (again.type_name, again.names, again.text, again.trace) == ("a.B", ("B", "Exception"), "text", "trace")
