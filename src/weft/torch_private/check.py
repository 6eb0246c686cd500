"""Whether the installed torch is one that weft was tested with, and has the private names that weft uses.

Asked once a process, in milliseconds: before ranks start, or, in a job whose group torch's own functions have
made, by the first feature that is used. Nothing of torch is imported for it. A name of a module that is not
loaded yet, such as Inductor's, is looked for in the text of the module's file.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from weft.errors import ConfigError
from weft.torch_private.entry import PrivateNames
from weft.torch_private.graph_names import DYNAMO, GRAPHS, INDUCTOR
from weft.torch_private.group_names import GROUPS, MESHES
from weft.torch_private.tensor_names import AUTOGRAD, MODULES, OPTIMIZERS, TENSORS

PRIVATE_NAMES: tuple[PrivateNames, ...] = (
    *AUTOGRAD,
    *TENSORS,
    *MODULES,
    *OPTIMIZERS,
    *GROUPS,
    *MESHES,
    *DYNAMO,
    *INDUCTOR,
    *GRAPHS,
)

# The releases that the whole table of docs/versions.md was measured with; pyproject.toml has the same bounds.
OLDEST, NEWEST = "2.11", "2.15"


@functools.cache
def check_torch() -> None:
    """Raise ConfigError where this torch lacks what weft needs; warn where weft was not tested with it.

    Of the ranks that torchrun starts the first one warns.
    """
    version = torch.__version__
    release = release_of(version)
    missing = [path for entry in entries_of(release) for path in find_missing(entry)]
    if missing:
        users = sorted(
            {user for entry in PRIVATE_NAMES for user in entry.used_in if {*entry.paths} & {*missing}}
        )
        raise ConfigError(
            f"torch {version} lacks {', '.join(missing)}, used in {', '.join(users)} of weft. weft was "
            f"tested with torch {OLDEST} to {NEWEST}: install one of these, or a weft made for "
            f"torch {release}."
        )
    is_tested = number_of(OLDEST) <= number_of(release) <= number_of(NEWEST)
    if not is_tested and os.environ.get("RANK", "0") == "0":
        warnings.warn(
            f"weft was tested with torch {OLDEST} to {NEWEST}; this is torch {version}. All private "
            "names of torch that weft uses are there, but may do something else now: compare a run with one "
            "on a tested release.",
            stacklevel=3,
        )


def release_of(version: str) -> str:
    """The release that a version is of: "2.15" of "2.15.1+cpu", and of its nightly builds."""
    found = re.match(r"\d+\.\d+", version)
    return found[0] if found else NEWEST


def number_of(release: str) -> tuple[int, ...]:
    """A release as numbers, which compare as releases do."""
    return tuple(int(part) for part in release.split("."))


def entries_of(release: str) -> Iterator[PrivateNames]:
    """The entries that a release of torch should have."""
    for entry in PRIVATE_NAMES:
        is_begun = not entry.since or number_of(entry.since) <= number_of(release)
        is_over = bool(entry.until) and number_of(entry.until) <= number_of(release)
        if is_begun and not is_over and not entry.is_convention:
            yield entry


def find_missing(entry: PrivateNames) -> Iterable[str]:
    """The paths of an entry that the installed torch lacks and weft can't do without.

    Names that only objects have are not looked for.
    """
    if entry.on_instances or entry.is_optional:
        return []
    return [path for path in entry.paths if not is_there(path)]


def is_there(path: str) -> bool:
    """Whether torch has a name, by the loaded module or by the text of the one that would be loaded."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        name, rest = ".".join(parts[:end]), parts[end:]
        if (module := sys.modules.get(name)) is not None:
            return _has(module, rest)
        if (file := _file_of(parts[1:end])) is not None:
            # Found in some form: only an import would tell more, and Inductor's takes seconds.
            return re.search(rf"\b{re.escape(rest[-1])}\b", file.read_text(encoding="utf-8")) is not None
    return False


def _has(found: object, names: Sequence[str]) -> bool:
    for name in names:
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def _file_of(parts: Sequence[str]) -> Path | None:
    """The file of a module of torch, if it has one."""
    place = Path(torch.__file__).parent.joinpath(*parts)
    for file in (place.with_suffix(".py"), place / "__init__.py"):
        if file.is_file():
            return file
    return None
