"""Make `.venv` and keep it in step with pyproject.toml and constraints.txt.

Run by every script, with the extras it needs as arguments. Done in milliseconds when nothing changed.

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
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

STAMP = "weft-installed.json"
UNFINISHED = "weft-unfinished"
INPUTS = ("pyproject.toml", "constraints.txt")

# (root, extras, the lock's descriptor): what puts packages into `.venv`. Tests pass their own.
Install = Callable[[Path, Sequence[str], int], None]


def main() -> None:
    """Bring the `.venv` of this repository up to date with the extras named on the command line."""
    ensure_environment(Path(__file__).resolve().parent.parent, sys.argv[1:], install_with_pip)


def ensure_environment(root: Path, extras: Sequence[str], install: Install) -> None:
    """Make or update `root/.venv` so that it has weft, editable, with at least `extras`."""
    where = root / ".venv"
    with locked(root / ".venv.lock") as lock:
        fingerprint = compute_fingerprint(root)
        if (where / UNFINISHED).exists() or (where.exists() and not runs(where)):
            shutil.rmtree(where)
        installed = read_stamp(where)
        if installed.get("fingerprint") == fingerprint and set(extras) <= set(installed["extras"]):
            return
        # Extras add up: a run of the tests must not make the next benchmark install its yardsticks again.
        wanted = sorted({*installed.get("extras", []), *extras})
        print(f"installing weft[{','.join(wanted)}] into .venv", file=sys.stderr)
        where.mkdir(exist_ok=True)
        (where / UNFINISHED).touch()
        (where / STAMP).unlink(missing_ok=True)
        if not (where / "bin" / "python").exists():
            venv.create(where, with_pip=True)
        install(root, wanted, lock)
        (where / STAMP).write_text(json.dumps({"fingerprint": fingerprint, "extras": wanted}))
        (where / UNFINISHED).unlink()


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Let one script at a time look at or change the environment; yield the lock's descriptor."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another script to finish installing into .venv", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def compute_fingerprint(root: Path) -> str:
    """Hash all that the installation depends on.

    The root is part of it because an editable install points at it: a moved repository installs again.
    """
    digest = hashlib.sha256(f"{root}\0".encode())
    for name in INPUTS:
        digest.update((root / name).read_bytes() + b"\0")
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


def read_stamp(where: Path) -> dict[str, object]:
    """Return what the last finished installation wrote, or nothing."""
    try:
        return json.loads((where / STAMP).read_text())
    except FileNotFoundError:
        return {}


def install_with_pip(root: Path, extras: Sequence[str], lock: int) -> None:
    """Install weft, editable, with its extras and the exact versions of constraints.txt."""
    constraints = root / "constraints.txt"
    package = f"{root}[{','.join(extras)}]" if extras else str(root)
    python = root / ".venv" / "bin" / "python"
    done = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--constraint", constraints, "--editable", package],
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
