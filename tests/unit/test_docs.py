"""``docs/cases.md`` says which test holds which case: each listed case has its row, and each test named there exists."""

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
LISTED = (
    *("1", "2", "3", "4", "5", "7", "9", "11", "15", "16", "17", "18", "19", "20", "21", "23", "24", "25", "26b", "27"),
    *("27b", "29", "30", "31", "32", "33", "34", "35d", "36", "48", "50", "51", "52", "54", "57", "57b", "58", "59", "60", "61"),
    *("62", "63", "64", "65", "66", "67", "68", "69", "70", "71", "72", "73", "74", "75", "76", "77", "79"),
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
