"""The fleets of the session tests, for the fault kit."""

from tests.ray.session.conftest import engine_pool as engine_pool
from tests.ray.session.conftest import start_fleet as start_fleet
