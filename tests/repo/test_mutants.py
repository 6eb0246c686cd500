"""The catalogue of mutants fits the tree: every entry applies, says enough, and changes what Python reads."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.catalogue import (
    CATALOGUE,
    CatalogueError,
    Mutant,
    check_mutant,
    choose_mutants,
    read_catalogue,
)

FEWEST = 150
GOOD = Mutant(
    name="sizes-are-shifted",
    file="tensors/flat.py",
    kind="off by one",
    old="        step *= max(size, 1)",
    new="        step *= max(size, 2)",
    suffers="Gradients of tensors with a dim of one lie elsewhere.",
)


@pytest.mark.parametrize("path", sorted(CATALOGUE.glob("*.toml")), ids=lambda path: path.stem)
def test_every_entry_applies_to_the_tree(path: Path) -> None:
    problems: list[str] = []
    for mutant in read_catalogue(path.parent, path.name):
        try:
            check_mutant(mutant)
        except CatalogueError as error:
            problems.append(str(error))
    assert problems == [], "adapt the entry to what the code says now, or take it out"


def test_there_are_enough_of_all_parts() -> None:
    mutants = [mutant for mutant in read_catalogue() if not mutant.needs_gpu]
    assert len(mutants) >= FEWEST
    folders = {path.parent.name for path in Path(CATALOGUE.parents[2], "src", "weft").glob("*/__init__.py")}
    assert folders - {mutant.part for mutant in mutants} == {"torch_private"}  # a list of names and versions


def test_names_are_short_and_given_once() -> None:
    names = Counter(mutant.name for mutant in read_catalogue())
    assert [name for name, count in names.items() if count > 1] == []
    assert [name for name in names if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+){2,9}", name)] == []


def test_the_good_entry_passes() -> None:
    check_mutant(GOOD)
    assert GOOD.describe_change() == "- step *= max(size, 1); + step *= max(size, 2)"
    assert GOOD.text.splitlines()[GOOD.line - 1].strip() == "step *= max(size, 1)"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"old": "step **= 2"}, "the text is 0 times in tensors/flat.py"),
        ({"old": "step"}, "and must be there once"),
        ({"within": "no_such"}, "has no function no_such"),
        ({"within": "view_in"}, "the text is 0 times in tensors/flat.py, view_in"),
        ({"new": "        step *= ("}, "not Python any more"),
        ({"new": "        step *= max(size,  1)  # the same"}, "nothing is changed"),
        ({"kind": "strange"}, "'strange' is none of the kinds"),
        ({"suffers": "a lot"}, "is a sentence"),
        ({"reached_by": ("no_such",)}, "has no function no_such"),
    ],
)
def test_an_entry_that_does_not_fit_is_found(change: dict[str, object], problem: str) -> None:
    with pytest.raises(CatalogueError, match=re.escape(problem)):
        check_mutant(dataclasses.replace(GOOD, **change))


def test_an_entry_may_name_the_function_that_it_is_in() -> None:
    twice = dataclasses.replace(
        GOOD, old="    expected = 1\n", new="    expected = 2\n", within="dense_strides"
    )
    assert "    expected = 2\n" in twice.apply(twice.text)
    check_mutant(twice)


def test_mutants_are_chosen_by_name_and_by_part() -> None:
    mutants = [GOOD, dataclasses.replace(GOOD, name="other-one-here", file="comm/handle.py")]
    assert choose_mutants(mutants, []) == mutants
    assert choose_mutants(mutants, ["tensors"]) == [GOOD]
    assert choose_mutants(mutants, ["other-one-here"]) == mutants[1:]
    with pytest.raises(CatalogueError, match="no mutant and no part has the name comms"):
        choose_mutants(mutants, ["comms", "tensors"])
