"""Checkpoints of `weft train`: a run that goes on has the losses of one that was never broken."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.train.runs import SMALL, alone, run_each, same_as
from weft.testing.pool import shared_pool
from weft.training import Checkpoints
from weft.training.job import Outcome
from weft.training.options import TrainOptions

pytestmark = pytest.mark.processes

Case = tuple[str, str]  # a strategy and a hook
PLAIN: list[Case] = [
    (strategy, "none") for strategy in ("ddp", "replicate", "fsdp", "hsdp", "tp", "ddp+tp", "fsdp+tp", "rpc")
]
HOOKED: dict[int, list[Case]] = {
    2: [("ddp", "int8"), ("replicate", "powersgd"), ("fsdp", "int8"), ("rpc", "int8")],
    4: [("ddp+tp", "powersgd"), ("hsdp", "int8"), ("fsdp+tp", "int8")],
}
BROKEN_AT = 3


def run(ranks: int, runs: Sequence[TrainOptions]) -> list[Outcome]:
    """The outcomes of these runs on so many ranks, as rank 0 tells them."""
    given = tuple(replace(options, ranks=ranks) for options in runs)
    return shared_pool(ranks).run(run_each, args=(given,), timeout=160)[0]


class Unbroken:
    """Runs that were never broken, with the checkpoint that each wrote half way. Made once asked for."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._made: dict[tuple[int, Case], tuple[Path, Outcome]] = {}

    def make(self, ranks: int, cases: Sequence[Case]) -> list[tuple[Path, Outcome]]:
        new = [case for case in dict.fromkeys(cases) if (ranks, case) not in self._made]
        runs = [
            replace(
                SMALL,
                strategy=strategy,
                hook=hook,
                checkpoint=self._factory.mktemp("saved"),
                every=BROKEN_AT,
            )
            for strategy, hook in new
        ]
        for case, options, outcome in zip(new, runs, run(ranks, runs) if runs else [], strict=True):
            assert options.checkpoint is not None
            # As if it had been killed before the end.
            shutil.rmtree(Checkpoints(options.checkpoint).path_of(SMALL.steps))
            self._made[ranks, case] = options.checkpoint, outcome
        return [self._made[ranks, case] for case in cases]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    return Unbroken(tmp_path_factory)


def go_on(ranks: int, cases: Sequence[tuple[Path, Case]], tmp_path: Path) -> list[Outcome]:
    """Go on from a copy of each of these checkpoints, with this strategy and hook."""
    runs = [
        replace(
            SMALL,
            strategy=strategy,
            hook=hook,
            checkpoint=shutil.copytree(saved, tmp_path / f"{i}"),
            resume=True,
        )
        for i, (saved, (strategy, hook)) in enumerate(cases)
    ]
    return run(ranks, runs)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, PLAIN), (2, HOOKED[2]), (4, PLAIN), (4, HOOKED[4])],
    ids=["2", "2-hooked", "4", "4-hooked"],
)
def test_the_same_strategy_goes_on_to_the_bit(
    ranks: int, cases: list[Case], unbroken: Unbroken, tmp_path: Path
) -> None:
    made = unbroken.make(ranks, cases)
    outcomes = go_on(ranks, [(saved, case) for (saved, _), case in zip(made, cases, strict=True)], tmp_path)
    for case, (_, whole), rest in zip(cases, made, outcomes, strict=True):
        assert rest.first_step == BROKEN_AT, case
        assert rest.losses == whole.losses[BROKEN_AT:], case


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 4), (4, 2), (4, 1), (2, 1)])
def test_another_strategy_or_number_of_ranks_goes_on(
    before: int, after: int, unbroken: Unbroken, tmp_path: Path
) -> None:
    # Each strategy reads what the one three places further on wrote, so every one is read and reads.
    pairs = list(zip(PLAIN[3:] + PLAIN[:3], PLAIN, strict=True))
    if after == 1:
        pairs = pairs[1::3]
    if after != before:
        pairs += [((name, "none"), (name, "none")) for name in ("fsdp+tp", "rpc")]
    made = unbroken.make(before, [writer for writer, _ in pairs])
    cases = [(saved, reader) for (saved, _), (_, reader) in zip(made, pairs, strict=True)]
    for pair, outcome in zip(pairs, go_on(after, cases, tmp_path), strict=True):
        assert outcome.first_step == BROKEN_AT, pair
        assert list(outcome.losses) == same_as(alone()[BROKEN_AT:]), pair


@pytest.mark.full
@pytest.mark.parametrize(
    ("after", "writer", "reader"),
    [
        (4, ("ddp", "int8"), ("ddp", "int8")),
        (4, ("fsdp", "int8"), ("ddp", "int8")),
        # As many ranks, but no state that would fit.
        (2, ("ddp", "int8"), ("fsdp", "int8")),
        (2, ("replicate", "powersgd"), ("ddp", "int8")),
        (2, ("ddp", "int8"), ("ddp", "powersgd")),
        (2, ("ddp", "none"), ("ddp", "int8")),
        (2, ("ddp", "int8"), ("ddp", "none")),
    ],
)
def test_the_state_of_a_hook_begins_anew_where_it_does_not_fit(
    after: int, writer: Case, reader: Case, unbroken: Unbroken, tmp_path: Path
) -> None:
    ((saved, _),) = unbroken.make(2, [writer])
    (outcome,) = go_on(after, [(saved, reader)], tmp_path)
    assert outcome.first_step == BROKEN_AT
    near = 0.5 if "powersgd" in (writer[1], reader[1]) else 0.02
    assert list(outcome.losses) == pytest.approx(list(alone()[BROKEN_AT:]), abs=near)


def test_the_last_few_stay_and_nothing_else(tmp_path: Path) -> None:
    options = replace(SMALL, checkpoint=tmp_path, every=1, keep=2)
    run(2, [options])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000006"]
    # One more step, on top of what is there, and every 4 steps as well as the last.
    run(2, [replace(options, steps=9, every=4, keep=3, resume=True, strategy="fsdp")])
    assert Checkpoints(tmp_path).steps() == [6, 8, 9]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000006",
        "step-00000008",
        "step-00000009",
    ]


def test_a_run_that_is_done_has_nothing_to_go_on_with(unbroken: Unbroken, tmp_path: Path) -> None:
    ((saved, _),) = unbroken.make(2, [("ddp", "none")])
    copy = shutil.copytree(saved, tmp_path / "copy")
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    (outcome,) = run(2, [replace(SMALL, steps=BROKEN_AT, checkpoint=copy, resume=True)])
    assert (outcome.first_step, outcome.losses) == (BROKEN_AT, ())
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


def test_resume_without_a_checkpoint_begins_at_the_beginning(tmp_path: Path) -> None:
    (outcome,) = run(2, [replace(SMALL, checkpoint=tmp_path / "none yet", resume=True)])
    assert outcome.first_step == 0
    assert list(outcome.losses) == same_as(alone())
