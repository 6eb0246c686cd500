"""A copy of the tree in a scratch folder, with an interpreter that imports weft from there and nowhere else.

Everything that runs the tests of a mutant happens in such a copy: the working tree is only read. The copy
borrows the packages of the tree's `.venv`. Its temporary folder is inside it, so all goes when it is removed.
"""

from __future__ import annotations

import importlib._bootstrap_external as bytecode
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.mutants.probes import ProbedFile, probe_file

ROOT = Path(__file__).resolve().parents[2]


class Scratch:
    """A copy of the working tree, what is not committed included. Made by `make_scratch`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.package = root / "src" / "weft"
        self.temporary = root / "tmp"
        self._inductor = root / "inductor"
        self.python = root / ".venv" / "bin" / "python"

    def fill(self) -> None:
        """Copy the tree, and make the interpreter."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():  # not one that is deleted and not yet committed as such
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        self.temporary.mkdir()
        self._make_environment()
        self._check()

    def _make_environment(self) -> None:
        venv.create(self.root / ".venv", with_pip=False, symlinks=True)
        packages = self.root / ".venv" / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
        # Of a .pth file: the packages come second, and their own .pth files, which name ROOT, aren't read.
        (packages / "scratch.pth").write_text(f"{self.root / 'src'}\n{sysconfig.get_path('purelib')}\n")
        theirs = Path(sys.prefix) / "bin"
        for program in theirs.iterdir():
            ours = self.python.parent / program.name
            start = f"#!{theirs}".encode()
            if program.is_file() and not ours.exists() and program.read_bytes().startswith(start):
                ours.write_bytes(
                    program.read_bytes().replace(str(theirs).encode(), str(ours.parent).encode(), 1)
                )
                ours.chmod(0o755)
        # Scripts that tests run look for this, and would install into the copy's .venv.
        environment = _load_environment_script()
        fingerprint = environment.compute_fingerprint(environment.Environment(self.root))
        stamp = json.loads((ROOT / ".venv" / environment.STAMP).read_text())
        (self.root / ".venv" / environment.STAMP).write_text(json.dumps(stamp | {"fingerprint": fingerprint}))

    def _check(self) -> None:
        """Make sure that what is tested is the copy."""
        done = subprocess.run(
            [self.python, "-c", "import weft.errors, torch; print(weft.__file__)"],
            cwd=self.temporary,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.stdout.strip() != str(self.package / "__init__.py"):
            raise RuntimeError(f"the copy in {self.root} is not what is imported: {done.stdout}{done.stderr}")

    def environment(self) -> dict[str, str]:
        """The environment for what runs in the copy."""
        without = ("PYTHON", "VIRTUAL_ENV", "PYTEST_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(without)}
        return kept | {"TMPDIR": str(self.temporary), "TORCHINDUCTOR_CACHE_DIR": str(self._inductor)}

    # -- changes ------------------------------------------------------------------------

    @contextmanager
    def changed(self, name: str, text: str) -> Generator[None]:
        """Give a file of weft another text, as long as the context lasts."""
        path = self.package / name
        original = path.read_bytes()
        try:
            path.write_text(text)
            self._forget_bytecode(path)
            yield
        finally:
            path.write_bytes(original)
            self._forget_bytecode(path)

    @staticmethod
    def _forget_bytecode(path: Path) -> None:
        # Python takes it for current by seconds and size, which two mutants may share.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def insert_probes(self) -> list[ProbedFile]:
        """Put probes into weft's bytecode; the text stays as it is. Such a copy takes no changes."""
        shutil.copy2(Path(__file__).with_name("reach.py"), self.package / "_reach.py")
        files: list[ProbedFile] = []
        num_probes = 0
        for path in sorted(self.package.rglob("*.py")):
            name = str(path.relative_to(self.package))
            if name == "_reach.py":
                continue
            file, code = probe_file(path, name, num_probes)
            files.append(file)
            num_probes += len(file.probes)
            compiled = Path(importlib.util.cache_from_source(str(path)))
            compiled.parent.mkdir(exist_ok=True)
            # Unchecked: Python never compares it with the text. So every process takes it, whatever its
            # environment.
            hashed = importlib.util.source_hash(path.read_bytes())
            compiled.write_bytes(bytecode._code_to_hash_pyc(code, hashed, False))  # type: ignore[attr-defined]
        return files

    def clean(self) -> None:
        """Remove what a run of the tests has left.

        Inductor's compiled kernels stay, since they take long and are found by what they compute. Its graphs
        go: those of a mutant might be taken for the next one's.
        """
        graphs = [self._inductor / name for name in ("fxgraph", "aotautograd")]
        for path in (self.temporary, self.root / ".hypothesis", *graphs):
            shutil.rmtree(path, ignore_errors=True)
        self.temporary.mkdir(exist_ok=True)


@contextmanager
def make_scratch() -> Generator[Scratch]:
    """A copy of the working tree, as long as the context lasts."""
    # A short name: sockets in temporary folders have a limit of 107 bytes.
    root = Path(tempfile.mkdtemp(prefix="mutants-")).resolve()
    try:
        scratch = Scratch(root)
        scratch.fill()
        yield scratch
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _load_environment_script() -> Any:
    spec = importlib.util.spec_from_file_location("environment", ROOT / "scripts" / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module
