"""What comes with an update of vLLM's ``ipc`` backend: whatever is wrong with it is told by the tensor's name, and nothing is opened."""

from __future__ import annotations

from typing import Any

import pytest

from ray_weightsync.transports.native.handles import require_handles

ARGS = (None,) * 7
WHOLE = {"GPU-1": ARGS}


@pytest.mark.parametrize(
    "update_info",
    [
        {"names": ["a", "b"], "ipc_handles": [WHOLE, WHOLE | {"GPU-2": ARGS}]},
        {"names": ["a", "b"], "ipc_handles": WHOLE},
        {"names": ["a"]},  # it is the backend's to say what is missing
    ],
)
def test_what_can_be_opened_passes(update_info: Any) -> None:
    require_handles(update_info, "GPU-1")
    require_handles(update_info, None)


@pytest.mark.parametrize(
    ("handles", "said"),
    [
        ([WHOLE, {"GPU-2": ARGS}], "'b' has no handle for this worker's GPU GPU-1, only for GPU-2"),
        ([WHOLE, {}], "'b' has no handle for this worker's GPU GPU-1, only for none"),
        ({"GPU-2": ARGS}, "'a' has no handle for this worker's GPU GPU-1, only for GPU-2"),
        ([WHOLE], "'b' has no handle: there are 1 for 2 tensors"),
        ([WHOLE, None], "'b' has NoneType in place of its handles"),
        ([WHOLE, {"GPU-1": ARGS[:6]}], "'b' has a handle that is none"),
        ([WHOLE, {"GPU-1": None}], "'b' has a handle that is none"),
    ],
)
def test_what_cannot_be_opened_is_refused_by_name(handles: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        require_handles({"names": ["a", "b"], "ipc_handles": handles}, "GPU-1")
