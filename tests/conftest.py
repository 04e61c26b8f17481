"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# The same random examples every time: what a run finds is what a change did. To look for more: --hypothesis-profile=default.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
