"""The fleets of the session tests, for the fault kit."""

from __future__ import annotations

import os
import tempfile

from tests.ray.session.conftest import start_fleet as start_fleet


def files_of_the_kit() -> set[str]:
    """The directories in which workers with faults leave their notes; each kit removes its own."""
    return {each for each in os.listdir(tempfile.gettempdir()) if each.startswith("rws-faults-")}
