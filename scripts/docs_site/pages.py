"""Which files of the repository are pages of the docs site, and their links turned into the site's.

Documents link to files: to each other, to sources, examples and folders. On the site each of these is a page:
documents under their own names, other files as listings of their source, folders as lists of files.

Invariant: every link of a document to a file of the repository becomes a link to a page. Talking to mkdocs is
hooks.py's work.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# Documents whose page has another name than their file. README.md is the front page, docs/README.md lists all
# pages. CHANGELOG.md is there from the first release on.
DOCUMENTS = {
    "README.md": "index.md",
    "docs/README.md": "contents.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/results/SUMMARY.md": "benchmarks.md",
}
SOURCES = "source"
LANGUAGES = {
    ".py": "python",
    ".toml": "toml",
    ".md": "markdown",
    ".json": "json",
    ".sh": "bash",
}

CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def page_of(path: str) -> str:
    """The page of a file or folder, both as paths: of the repository and of the site's documents."""
    if path in DOCUMENTS:
        return DOCUMENTS[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{SOURCES}/{path}/index.md" if (ROOT / path).is_dir() else f"{SOURCES}/{path}.md"


def file_of(page: str) -> str:
    """The file of the repository that a document's page is made of."""
    return {page: path for path, page in DOCUMENTS.items()}.get(page, f"docs/{page}")


def map_links(text: str, change: Callable[[str], str]) -> str:
    """Markdown with every link to a file changed; code is left alone, and so are links elsewhere."""

    def replaced(found: re.Match[str]) -> str:
        before, target, after = found.groups()
        is_elsewhere = "://" in target or target.startswith(("#", "mailto:"))
        return found[0] if is_elsewhere else f"{before}{change(target)}{after}"

    parts = CODE.split(text)  # code is at the odd places
    # A link's text may be code, so the parts can't be changed one by one: code is set aside.
    codes: list[str] = parts[1::2]
    prose = "".join(part if at % 2 == 0 else f"\0{at // 2}\0" for at, part in enumerate(parts))
    return re.sub(r"\0(\d+)\0", lambda found: codes[int(found[1])], LINK.sub(replaced, prose))


def find_linked(text: str, path: str) -> set[str]:
    """The files and folders of the repository that a document links to."""
    found: set[str] = set()

    def note(target: str) -> str:
        found.add(_resolve(target, path)[0])
        return target

    map_links(text, note)
    return found


def rewrite_links(text: str, path: str) -> str:
    """A document of the repository with its links as they are on its page."""
    here = posixpath.dirname(page_of(path))

    def to_page(target: str) -> str:
        file, anchor = _resolve(target, path)
        return posixpath.relpath(page_of(file), here or ".") + anchor

    return map_links(text, to_page)


def _resolve(target: str, path: str) -> tuple[str, str]:
    file, hash_, anchor = target.partition("#")
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), file)), hash_ + anchor


# -- listings ------------------------------------------------------------------------


def find_sources(documents: Iterable[str], more: Iterable[str] = ()) -> list[str]:
    """The files and folders that need a listing: what documents link to, `more`, and files of linked folders.

    A link to a file that isn't there gets none, so that mkdocs reports it on the page where it is.
    """
    linked = {file for path in documents for file in find_linked((ROOT / path).read_text(), path)}
    found = {
        file
        for file in linked | set(more)
        if page_of(file).startswith(f"{SOURCES}/") and (ROOT / file).exists()
    }
    for folder in [file for file in found if (ROOT / file).is_dir()]:
        found.update(f"{folder}/{name}" for name in list_folder(folder))
    return sorted(found)


def list_folder(folder: str) -> list[str]:
    """The names of the files in a folder that have something to read."""
    return sorted(
        path.name
        for path in (ROOT / folder).iterdir()
        if path.is_file() and path.suffix in (*LANGUAGES, ".ipynb") and path.name != "__init__.py"
    )


def make_listing(path: str) -> str:
    """The page of a file or folder that is no document. The search leaves it out: it would find code only."""
    if (ROOT / path).is_dir():
        body = "".join(f"- [{name}]({name}.md){_say(f'{path}/{name}')}\n" for name in list_folder(path))
    elif path.endswith(".ipynb"):
        body = rewrite_links(make_notebook((ROOT / path).read_text()), path)
    else:
        body = fence((ROOT / path).read_text(), LANGUAGES.get(Path(path).suffix, "text"))
    return f"---\nsearch:\n  exclude: true\nhide: [toc]\n---\n\n# `{path}`\n\n{body}"


def _say(path: str) -> str:
    if not path.endswith(".py"):
        return ""
    first_line = (ast.get_docstring(ast.parse((ROOT / path).read_text())) or "").partition("\n")[0]
    return f": {first_line}" if first_line else ""


def make_notebook(text: str) -> str:
    """A notebook's cells one after the other, with the output that was saved with them."""
    parts: list[str] = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else fence(source, "python"))
        outputs = "".join(_read_output(output) for output in cell.get("outputs", ()))
        if outputs:
            parts.append(fence(outputs, "text"))
    return "\n\n".join(parts).replace("\n# ", "\n## ")


def _read_output(output: dict[str, Any]) -> str:
    return "".join(output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"])


def fence(text: str, language: str) -> str:
    """Text as a block of code, whatever fences it has itself."""
    marks = "`" * (1 + max((len(found) for found in re.findall("`{3,}", text)), default=2))
    return f"{marks}{language}\n{text.rstrip()}\n{marks}\n"
