"""Make `.venv` and keep it in step with pyproject.toml and constraints.txt.

Run by every script, with the extras it needs as arguments. Done in milliseconds when nothing changed.
`scripts/matrix` makes its environments here too, of other versions.

Invariant: a `.venv` that holds the stamp is whole. Before any change the stamp makes way for the mark
UNFINISHED, so an install that was interrupted leaves the mark behind and the next run starts over. A `.venv`
with neither was made by hand: it is installed into, never removed.

Needs nothing but the standard library, as it runs before anything is installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STAMP = "weft-installed.json"
UNFINISHED = "weft-unfinished"
INPUTS = ("pyproject.toml", "constraints.txt")


@dataclass(frozen=True)
class Environment:
    """A virtual environment for the repository at `root`.

    `interpreter` is the Python it is made of, by default the one that runs this. `pins` ("torch==2.15.*")
    take the place of what constraints.txt says of the same packages.
    """

    root: Path
    folder: str = ".venv"
    interpreter: str | None = None
    pins: tuple[str, ...] = ()

    @property
    def where(self) -> Path:
        return self.root / self.folder

    @property
    def python(self) -> Path:
        return self.where / "bin" / "python"

    @property
    def constraints(self) -> Path:
        """The file of exact versions: the repository's, or its own where it has pins."""
        return self.where / "constraints.txt" if self.pins else self.root / "constraints.txt"


# (environment, extras, the lock's descriptor): what puts packages into it. Tests pass their own.
Install = Callable[[Environment, Sequence[str], int], None]


def main() -> None:
    """Bring the `.venv` of this repository up to date with the extras named on the command line."""
    ensure_environment(Environment(Path(__file__).resolve().parent.parent), sys.argv[1:], install_with_pip)


def ensure_environment(environment: Environment, extras: Sequence[str], install: Install) -> None:
    """Make or update an environment so that it has weft, editable, with at least `extras`."""
    where = environment.where
    with locked(where.with_name(f"{where.name}.lock")) as lock:
        fingerprint = compute_fingerprint(environment)
        if (where / UNFINISHED).exists() or (where.exists() and not runs(where)):
            shutil.rmtree(where)
        installed = read_stamp(where)
        if installed.get("fingerprint") == fingerprint and set(extras) <= set(installed["extras"]):
            return
        # Extras add up: a run of the tests must not make the next benchmark install its yardsticks again.
        wanted = sorted({*installed.get("extras", []), *extras})
        print(f"installing weft[{','.join(wanted)}] into {environment.folder}", file=sys.stderr)
        where.mkdir(exist_ok=True)
        (where / UNFINISHED).touch()
        (where / STAMP).unlink(missing_ok=True)
        if not environment.python.exists():
            make_environment(environment)
        install(environment, wanted, lock)
        (where / STAMP).write_text(json.dumps({"fingerprint": fingerprint, "extras": wanted}))
        (where / UNFINISHED).unlink()


def make_environment(environment: Environment) -> None:
    """Make it, empty but for pip."""
    if environment.interpreter is None:
        venv.create(environment.where, with_pip=True)
    else:
        subprocess.run([environment.interpreter, "-m", "venv", environment.where], check=True)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Let one script at a time look at or change the environment; yield the lock's descriptor."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another script to let go of {path.name}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def compute_fingerprint(environment: Environment) -> str:
    """Hash all that the installation depends on.

    The root is part of it because an editable install points at it: a moved repository installs again.
    """
    digest = hashlib.sha256(f"{environment.root}\0{''.join(environment.pins)}".encode())
    for name in INPUTS:
        digest.update((environment.root / name).read_bytes() + b"\0")
    return digest.hexdigest()


def runs(where: Path) -> bool:
    """Say whether the environment's Python starts: it does not when the Python it was made from is gone."""
    python = where / "bin" / "python"
    if not os.path.lexists(python):
        return True  # Not broken, only not made yet.
    try:
        return subprocess.run([python, "-c", ""], check=False).returncode == 0
    except OSError:
        return False


def read_stamp(where: Path) -> dict[str, Any]:
    """Return what the last finished installation wrote, or nothing."""
    try:
        return json.loads((where / STAMP).read_text())
    except FileNotFoundError:
        return {}


def replace_pins(constraints: str, pins: Sequence[str]) -> str:
    """The lines of constraints.txt with these in place of those of the same packages."""
    names = {re.split("[=<>]", pin)[0] for pin in pins}
    kept = [line for line in constraints.splitlines() if line.split("==")[0] not in names]
    return "\n".join([*kept, *pins, ""])


def install_with_pip(environment: Environment, extras: Sequence[str], lock: int) -> None:
    """Install weft, editable, with its extras and the exact versions of constraints.txt."""
    root, constraints = environment.root, environment.constraints
    if environment.pins:
        constraints.write_text(replace_pins((root / "constraints.txt").read_text(), environment.pins))
    package = f"{root}[{','.join(extras)}]" if extras else str(root)
    command = [environment.python, "-m", "pip", "install", "--quiet", "--constraint", constraints]
    if environment.pins:
        command.append("--no-compile")  # tests import a part of torch; compiling the rest takes a minute
    done = subprocess.run(
        [*command, "--editable", package],
        # The option does not reach the isolated environment that builds the package; the variable does.
        env={**os.environ, "PIP_CONSTRAINT": str(constraints), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        # pip holds the lock too: should this process be killed, the next script waits until pip has ended.
        pass_fds=[lock],
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"scripts/environment.py: pip failed with status {done.returncode}; its output is above.")


if __name__ == "__main__":
    main()
