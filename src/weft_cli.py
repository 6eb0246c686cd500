"""The command `weft`: answers `--version` without importing torch, and leaves the rest to weft/__main__.py.

It stands beside the package because Python imports a package before any module in it, and `import weft`
imports torch, which takes seconds.
"""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> int:
    """Run the command line's arguments and return the exit code."""
    if sys.argv[1:] == ["--version"]:
        print(f"weft {read_version()}")
        return 0
    from weft.__main__ import main as run_command

    return run_command()


def read_version() -> str:
    """The version of the weft that `import weft` would load, without loading it."""
    spec = find_spec("weft")
    assert spec is not None
    assert spec.submodule_search_locations
    return runpy.run_path(str(Path(spec.submodule_search_locations[0], "version.py")))["__version__"]
