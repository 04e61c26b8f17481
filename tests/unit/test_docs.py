"""The tables in ``docs`` are true.

``cases.md`` says which test holds which case: each listed case has its row, and each test named there exists. ``what-ran-where.md`` says
what was run on which hardware: each test named there exists, and those that need a GPU are as their markers say.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "cases.md").read_text().splitlines()
    if re.match(r"\| \d", line)
]
LISTED = re.findall(
    r"\S+",
    "1 2 3 4 5 6 7 9 11 12 14 15 16 17 18 19 20 21 23 24 25 26 26b 27 27b 28 29 30 31 32 33 34 35d 35f 36 37 38 40 41 42 43 47 48 49 50 "
    "51 52 54 55 57 57b 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79",
)


@cache
def names_in(path: str) -> frozenset[str]:
    """Names of the tests in a file, ``Class::test`` for those of a class."""
    tree = ast.parse((ROOT / path).read_text())
    classes = {"": tree.body} | {f"{node.name}::": node.body for node in tree.body if isinstance(node, ast.ClassDef)}
    functions = {prefix: [node for node in body if isinstance(node, ast.FunctionDef)] for prefix, body in classes.items()}
    return frozenset(prefix + node.name for prefix, nodes in functions.items() for node in nodes if node.name.startswith("test_"))


def test_every_listed_case_has_one_row() -> None:
    numbers = [number for number, _, _ in ROWS]
    assert len(numbers) == len(set(numbers))
    assert set(LISTED) <= set(numbers)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_every_test_named_for_a_case_exists(row: list[str]) -> None:
    number, claim, named = row
    assert claim
    tests = [each.strip("`") for each in named.split("<br>")]
    assert tests
    assert len(tests) == len(set(tests))
    for each in tests:
        path, _, name = each.partition("::")
        assert (ROOT / path).is_file(), f"case {number}: there is no {path}"
        assert name in names_in(path), f"case {number}: there is no {each}"


WHERE = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "what-ran-where.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| What |", "| --- |"))
]


def last_run(path: Path) -> str | None:
    """What the ``gpu`` marker of a test file says."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.gpu":
            (said,) = [ast.literal_eval(each.value) for each in node.keywords if each.arg == "last_run"]
            assert said is None or isinstance(said, str)
            return said
    raise AssertionError(f"{path} has no marker gpu(last_run=...)")


@pytest.mark.parametrize("row", WHERE, ids=[row[0] for row in WHERE])
def test_every_test_that_is_said_to_run_somewhere_exists(row: list[str]) -> None:
    _, on_cpu, by_hand = row
    paths = re.findall(r"`(tests/[^`]*)`", on_cpu + by_hand)
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "gpu").glob("test_*.py")), ids=lambda path: path.stem)
def test_what_needs_a_gpu_was_run_when_its_marker_says_so(path: Path) -> None:
    (row,) = [by_hand for _, _, by_hand in WHERE if f"`tests/gpu/{path.name}`" in by_hand]
    assert row.endswith(f": {last_run(path) or 'not yet run'}")
