"""A trainer actor keeps one sender a session, and none of an earlier session of the same name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_weightsync.config import Host
from ray_weightsync.session_options import settings_of
from ray_weightsync.trainer import mixin as module
from ray_weightsync.trainer.mixin import TrainerMixin


class Sender:
    def __init__(self, session: str, link: Any, *, settings: Any) -> None:
        self.settings, self.handle, self.closed = settings, link.handle, False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "SnapshotSender", Sender)
    return TrainerMixin()


SETTINGS = settings_of(transport="host")
OTHERS = replace(SETTINGS, transport=Host(directory="/dev/other"))


def test_a_session_s_rounds_share_a_sender(trainer: Any) -> None:
    first = trainer._rws_sender("s", "coordinator", SETTINGS)
    assert trainer._rws_sender("s", "coordinator", settings_of(transport="host")) is first


@pytest.mark.parametrize(("coordinator", "settings"), [("coordinator", OTHERS), ("another", SETTINGS)])
def test_a_new_session_of_a_name_is_sent_by_its_own_settings(trainer: Any, coordinator: str, settings: Any) -> None:
    first = trainer._rws_sender("s", "coordinator", SETTINGS)
    second = trainer._rws_sender("s", coordinator, settings)
    assert first.closed
    assert (second.settings, second.handle, second.closed) == (settings, coordinator, False)
