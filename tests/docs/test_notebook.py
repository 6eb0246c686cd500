"""The sample notebook runs in a Jupyter kernel, cell by cell, and prints what was saved with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from scripts.docs_site.pages import make_notebook

REPO = Path(__file__).parents[2]
NOTEBOOK = REPO / "examples" / "notebook.ipynb"

# In a process of its own: Jupyter's client leaves sockets to the garbage collection, which is a warning here.
# The kernel's sockets are files.
RUN = """
import sys
import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

source, result, sockets = sys.argv[1:]
notebook = nbformat.read(source, as_version=4)
nbformat.validate(notebook)
kernel = KernelManager(transport="ipc", ip=sockets)
NotebookClient(notebook, km=kernel, timeout=200, startup_timeout=200).execute()
nbformat.write(notebook, result)
"""


def run(notebook: Path, where: Path) -> subprocess.CompletedProcess[str]:
    """Run all cells in `where`, and write the notebook with their outputs to result.ipynb there."""
    names = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")
    with tempfile.TemporaryDirectory() as sockets:  # not below `where`: names of sockets are short
        return subprocess.run(
            [sys.executable, "-c", RUN, notebook, where / "result.ipynb", f"{sockets}/kernel"],
            cwd=where,
            env=os.environ | {name: str(where / name) for name in names} | {"PYTHONPATH": str(REPO / "src")},
            capture_output=True,
            text=True,
            timeout=300,
        )


def read_cells(notebook: Path) -> list[Any]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


def read_outputs(cell: Any) -> str:
    """What a cell printed and returned. Not stderr: there it says which backend this machine has."""
    texts = [
        output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"]
        for output in cell["outputs"]
        if output.get("name") != "stderr"
    ]
    return "".join(part for text in texts for part in text)


@pytest.mark.processes
def test_the_notebook_prints_what_was_saved_with_it(tmp_path: Path) -> None:
    done = run(NOTEBOOK, tmp_path)
    assert done.returncode == 0, done.stderr
    saved = [read_outputs(cell) for cell in read_cells(NOTEBOOK)]
    assert all(saved)
    assert [read_outputs(cell) for cell in read_cells(tmp_path / "result.ipynb")] == saved


@pytest.mark.processes
def test_a_cell_that_raises_fails(tmp_path: Path) -> None:
    cell = {
        "cell_type": "code",
        "source": "import weft\nweft.launch(lambda: 1 / 0, ranks=1, kind='thread')",
        "id": "a",
        "metadata": {},
        "outputs": [],
        "execution_count": None,
    }
    notebook = tmp_path / "bad.ipynb"
    notebook.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    done = run(notebook, tmp_path)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_the_notebook_is_a_page_of_the_site() -> None:
    page = make_notebook(NOTEBOOK.read_text())
    assert "\n## Train a model\n" in page
    assert "```python\nweft.launch(hello, ranks=2, " in page
    assert "```text\n['hello: rank 0 of 2 got 3', " in page
