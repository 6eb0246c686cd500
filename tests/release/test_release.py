"""What a user installs: the sdist, the wheel built of it, and jobs in an environment without this checkout.

The environment has the wheel and the packages that the wheel requires. Those are links to the installed ones,
as torch takes minutes to install; anything else (pytest, what scripts need, this checkout) isn't there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from email.parser import Parser
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import weft
from tests.repo.commands import find_blocks
from tests.repo.test_hygiene import list_files
from tests.repo.test_readme import find_promised_output

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]

LOOK_AROUND = """
import sys
from importlib import metadata, util
import weft
print(weft.__file__, metadata.version("weft"), sep="\\n")
print(util.find_spec("pytest"), util.find_spec("hatchling"), *sys.path, sep="\\n")
"""


@dataclass(frozen=True)
class Release:
    """An sdist of this tree, the wheel built of that sdist, and an environment that has the wheel."""

    sdist: Path
    wheel: Path
    environment: Path

    def run(self, program: str, *arguments: str | Path, cwd: Path) -> str:
        """Run a program of the environment elsewhere, and return what it prints."""
        return run(self.environment / "bin" / program, *arguments, cwd=cwd)


def run(*command: str | Path, cwd: Path) -> str:
    # What names folders of Python's to look into would let the checkout in.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    here = tmp_path_factory.mktemp("release")
    build = (sys.executable, "-m", "hatchling", "build", "--directory", here)
    run(*build, "--target", "sdist", cwd=ROOT)
    (sdist,) = here.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(here, filter="data")
    run(*build, "--target", "wheel", cwd=here / sdist.name.removesuffix(".tar.gz"))
    (wheel,) = here.glob("*.whl")
    environment = here / "environment"
    make_environment(environment, read_requirements(wheel))
    # pip of this environment, working on that one: --no-index, so the network is not asked.
    pip = (sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install")
    run(*pip, "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", wheel, cwd=here)
    return Release(sdist, wheel, environment)


def read_requirements(wheel: Path) -> list[str]:
    """What a wheel requires, its extras left out."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(path).decode())
    return [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]


def make_environment(where: Path, requirements: Iterable[str]) -> None:
    """Make an environment with links to the packages that are required, and to those that they require."""
    venv.create(where)
    (packages,) = where.glob("lib/python*/site-packages")
    for required in find_distributions(requirements):
        for name in sorted({file.parts[0] for file in required.files or ()}):
            link = packages / name
            # What lies outside is programs; what is there already is a folder that two packages share.
            if name != ".." and not link.exists():
                link.symlink_to(Path(str(required.locate_file(name))))


def find_distributions(requirements: Iterable[str]) -> list[Distribution]:
    """The installed packages that meet the requirements, and all that those require."""
    found: dict[str, Distribution] = {}
    asked = [Requirement(text) for text in requirements]
    while asked:
        requirement = asked.pop()
        extras = ["", *requirement.extras]
        name = f"{requirement.name}[{','.join(sorted(requirement.extras))}]"
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not wanted or name in found:
            continue
        found[name] = distribution(requirement.name)
        for text in found[name].requires or ():
            further = Requirement(text)
            if further.marker is None:
                asked.append(further)
            elif any(further.marker.evaluate({"extra": extra}) for extra in extras):
                further.marker = None
                asked.append(further)
    return list(found.values())


def test_the_sdist_is_the_repository(release: Release) -> None:
    with tarfile.open(release.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names - {"PKG-INFO"} == {str(path.relative_to(ROOT)) for path in list_files()}


def test_the_wheel_is_the_package_and_its_metadata(release: Release) -> None:
    with zipfile.ZipFile(release.wheel) as archive:
        names = set(archive.namelist())
    source = ROOT / "src"
    package = {str(path.relative_to(source)) for path in list_files() if source in path.parents}
    about = f"weft-{weft.__version__}.dist-info"
    assert names - package == {
        f"{about}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    }
    assert package <= names
    assert {"weft/py.typed", "weft/training/weft.txt", "weft/observe/page/page.html"} <= names


def test_the_wheel_is_what_the_environment_has(release: Release, tmp_path: Path) -> None:
    assert release.run("weft", "--version", cwd=tmp_path) == f"weft {weft.__version__}\n"
    file, version, *others = release.run("python", "-c", LOOK_AROUND, cwd=tmp_path).splitlines()
    assert release.environment in Path(file).parents
    assert version == weft.__version__
    assert others[:2] == ["None", "None"]
    assert not [path for path in others[2:] if ROOT in Path(path).parents or Path(path) == ROOT]


def test_the_fifteen_lines_of_the_readme_run(release: Release, tmp_path: Path) -> None:
    (example,) = find_blocks((ROOT / "README.md").read_text(), "python")
    (tmp_path / "example.py").write_text(example)
    printed = release.run("python", "-W", "error", "example.py", cwd=tmp_path)
    assert printed == find_promised_output(example) != ""


def test_a_model_is_trained_and_its_run_drawn(release: Release, tmp_path: Path) -> None:
    printed = release.run("weft", "train", "--ranks", "2", "--steps", "3", "--record", "run", cwd=tmp_path)
    assert re.search(r"^step 3/3 ", printed, re.MULTILINE)
    release.run("weft", "report", "run", cwd=tmp_path)
    (page,) = (tmp_path / "run").glob("*.html")
    assert "<html" in page.read_text()
