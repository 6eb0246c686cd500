"""What the mutants came to: results as they are kept, and the table that is made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutants.catalogue import Mutant
from tests.mutants.running import Verdict


@dataclass(frozen=True)
class Result:
    """The verdicts on a mutant, and which change of which text they are on."""

    fingerprint: str
    verdicts: dict[str, Verdict]
    date: str


class Results:
    """The results of this run and of earlier ones, in a file that is whole at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        saved = json.loads(path.read_text()) if path.exists() else {}
        self._results = {
            name: Result(
                entry["fingerprint"],
                {tier: Verdict(**verdict) for tier, verdict in entry["verdicts"].items()},
                entry["date"],
            )
            for name, entry in saved.items()
        }

    def find(self, mutant: Mutant) -> Result | None:
        """The result of a mutant, unless its file has changed since."""
        result = self._results.get(mutant.name)
        return result if result is not None and result.fingerprint == mutant.fingerprint else None

    def keep(self, mutant: Mutant, verdicts: dict[str, Verdict], date: str) -> None:
        """Put a result in place of an earlier one, and write all of them down."""
        self._results[mutant.name] = Result(mutant.fingerprint, verdicts, date)
        unfinished = self._path.with_suffix(".new")
        unfinished.write_text(
            json.dumps({name: asdict(result) for name, result in self._results.items()}, indent=1) + "\n"
        )
        unfinished.replace(self._path)


def make_table(mutants: Sequence[Mutant], results: Results) -> str:
    """A row for each part of weft and one for all, then the survivors. Of mutants that have a result."""
    counted = [
        (mutant, result.verdicts)
        for mutant in mutants
        if not mutant.needs_gpu and (result := results.find(mutant)) is not None
    ]
    lines = [["part", "mutants", "killed by everyday", "killed by full", "everyday / full"]]
    parts = sorted({mutant.part for mutant, _ in counted})
    for part in [*parts, "all"]:
        chosen = [verdicts for mutant, verdicts in counted if part in (mutant.part, "all")]
        everyday = sum(verdicts["everyday"].killed for verdicts in chosen)
        full = sum(verdicts["full"].killed for verdicts in chosen if "full" in verdicts)
        is_full_known = all("full" in verdicts for verdicts in chosen)
        ratio = f"{everyday / full:.1%}" if is_full_known and full else ""
        lines.append([part, str(len(chosen)), str(everyday), str(full) if is_full_known else "", ratio])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    rows = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    text = "".join(f"| {row} |\n" for row in rows)

    num_untried = sum(not mutant.needs_gpu and results.find(mutant) is None for mutant in mutants)
    num_gpu = sum(mutant.needs_gpu for mutant in mutants)
    if num_untried or num_gpu:
        text += f"\nNot counted: {num_untried} not tried yet, {num_gpu} that need a GPU to be seen.\n"
    survivors = [(m, v) for m, v in counted if not all(verdict.killed for verdict in v.values())]
    for title, is_one in (("Survived every tier", False), ("Killed by the full tier alone", True)):
        listed = [(m, v) for m, v in survivors if is_one == any(verdict.killed for verdict in v.values())]
        if listed:
            text += f"\n{title}:\n\n" + "\n".join(describe_survivor(m, v) for m, v in listed) + "\n"
    return text


def describe_survivor(mutant: Mutant, verdicts: dict[str, Verdict]) -> str:
    last = list(verdicts.values())[-1]
    where = f"src/weft/{mutant.file}:{mutant.line}"
    return (
        f"- `{mutant.name}`, {where} ({mutant.kind}): `{mutant.describe_change()}`\n"
        f"  {mutant.suffers} In the {list(verdicts)[-1]} tier: {last}."
    )
