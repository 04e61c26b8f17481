"""What tests of several rooms share."""

from __future__ import annotations

import pytest

from tests.unit.aside import Aside


@pytest.fixture
def aside() -> type[Aside]:
    return Aside
