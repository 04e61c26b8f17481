"""The house: a room knows only the rooms listed before it, and vllm is met only where engines run."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ray_weightsync

PACKAGE = Path(ray_weightsync.__file__).parent
ROOMS = (
    ("errors", "config", "report"),
    ("protocol",),
    ("weights",),
    ("worker",),
    ("transports",),
    ("engines",),
    ("fleet",),
    ("trainer",),
    ("placement", "probing", "follower", "replacer", "view", "session_options", "session_life", "session", "cli", "testing", "__init__"),
)
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))

ONLY_IN_ENGINES = {
    "worker/agreement.py",
    "worker/backend.py",
    "worker/reload.py",
    "worker/twin.py",
    "engines/plugin.py",
    "engines/plugin_backend.py",
    "testing/extension.py",
}
"""Modules that are imported in engine processes alone; elsewhere vllm is imported inside functions that run there."""


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path, *, run_time_only: bool = False) -> Iterator[tuple[str, bool]]:
    """Every module that a file imports, and whether it does so when it is itself imported."""
    tree = ast.parse(path.read_text())
    at_top: set[ast.AST] = set()
    for statement in tree.body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            if run_time_only:
                for node in ast.walk(statement):
                    node.lineno = -1  # type: ignore[attr-defined]
            continue
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            at_top.update(ast.walk(statement))
    for node in ast.walk(tree):
        if getattr(node, "lineno", 0) == -1:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in at_top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            yield node.module, node in at_top


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_knows_only_the_rooms_before_it(path: Path) -> None:
    room = room_of(path)
    assert room in LEVEL, f"{room} has no place in the house"
    for module, _ in imports(path):
        if module.startswith("ray_weightsync."):
            other = module.split(".")[1]
            assert LEVEL[other] <= LEVEL[room], f"{path.relative_to(PACKAGE)} imports {module}, a later room"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_vllm_is_imported_only_where_engines_run(path: Path) -> None:
    if str(path.relative_to(PACKAGE)) in ONLY_IN_ENGINES:
        return
    at_import = [module for module, top in imports(path, run_time_only=True) if top and module.split(".")[0] == "vllm"]
    assert not at_import


@pytest.mark.parametrize("room", ["weights", "worker"])
def test_lower_rooms_import_ray_only_inside_functions(room: str) -> None:
    for path in (PACKAGE / room).rglob("*.py"):
        at_import = [module for module, top in imports(path, run_time_only=True) if top and module.split(".")[0] == "ray"]
        assert not at_import, path


def test_importing_the_package_imports_neither_torch_nor_ray_nor_vllm() -> None:
    code = "import sys, ray_weightsync; print([name for name in ('torch', 'ray', 'vllm') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "modules",
    [
        ["transports.host.actor", "fleet.cluster"],
        ["fleet.actor", "engines.torch_engine", "engines.vllm_actor"],  # it is handed actors of these, whose classes Ray imports
    ],
    ids=["snapshot_store", "coordinator"],
)
def test_the_actors_of_a_session_start_without_torch(modules: list[str]) -> None:
    code = f"import sys, {', '.join(f'ray_weightsync.{each}' for each in modules)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_using_every_public_name_does_not_import_vllm() -> None:
    code = "import sys, ray_weightsync as r; [getattr(r, n) for n in r.__all__]; print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_all_is_sorted_complete_and_resolves() -> None:
    assert ray_weightsync.__all__ == sorted(ray_weightsync.__all__)
    assert set(ray_weightsync.__all__) == set(ray_weightsync._HOME)
    for name in ray_weightsync.__all__:
        assert getattr(ray_weightsync, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ray_weightsync.no_such_name
