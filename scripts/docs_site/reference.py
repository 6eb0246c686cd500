"""Pages of the API reference: which names are public, and the Markdown that mkdocstrings fills in.

A namespace's public names are its `__all__`, without private ones and those for weft's own layers. Each is
described on one page; the page of `weft` lists all of its names. Files are parsed, not imported.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scripts.docs_site.pages import ROOT

SRC = ROOT / "src"


@dataclass(frozen=True)
class Namespace:
    """A module of the reference. Its `internal` names are for weft's own layers."""

    name: str
    guide: str = ""
    """The page of docs/ that says how it is used."""
    internal: frozenset[str] = frozenset()
    parts: tuple[str, ...] = ()
    """Submodules that users import from by name."""
    shown: tuple[str, ...] = ()
    """Names of other submodules that the guide tells users to import."""

    @property
    def page(self) -> str:
        return f"api/{self.name}.md"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NAMESPACES = (
    Namespace("weft.launcher", "launch.md"),
    Namespace("weft.data_parallel", "data_parallel.md"),
    Namespace("weft.fsdp", "fully_shard.md"),
    Namespace("weft.tensor_parallel", "tensor_parallel.md"),
    Namespace(
        "weft.comm_hooks",
        "comm_hooks.md",
        parts=(
            "default_hooks",
            "quantization_hooks",
            "powerSGD_hook",
            "post_localSGD_hook",
            "ddp_zero_hook",
            "optimizer_overlap_hooks",
            "debugging_hooks",
        ),
        shown=("in_order.run_in_order",),
    ),
    Namespace("weft.join", "join.md"),
    Namespace("weft.optimizers", "optimizers.md"),
    Namespace(
        "weft.compiler",
        "compile.md",
        internal=_words(
            """LARGE_NUMEL Bucket GradientOwner Slot Wire Work allow_in_graph at_trace backend
            call_before_traces current_trace enlist form_in_force install is_backward_traced is_tracing
            made_again_in_backward note_gathers note_owner opened_piece run_at_trace run_passes"""
        ),
    ),
    Namespace(
        "weft.comm",
        "communication.md",
        internal=_words(
            """Call DesyncCheck Watcher all_gathered all_reduced check_layout chunk_sizes cut exchanged
            install_desync_check install_watcher launch_move local_in reduce_scattered remove_watcher"""
        ),
        shown=("group.resolve_group",),
    ),
    Namespace("weft.local", "local_group.md", internal=_words("create_local_group")),
    Namespace("weft.rpc", "rpc.md", parts=("functions",)),
    Namespace("weft.dist_autograd", "dist_autograd.md"),
    Namespace("weft.training", "train.md", internal=_words("define_demo_command define_train_command")),
    Namespace("weft.observe", "report.md", internal=_words("define_report_command")),
    Namespace("weft.planning", "plan.md", internal=_words("define_plan_command")),
    Namespace("weft.testing", "testing.md", parts=("models",)),
    Namespace("weft.errors"),
)

# Classes whose methods are not for users: they get an object from one function and give it to another.
OPAQUE = {"weft.rpc.agent.Agent"}


@dataclass(frozen=True)
class Entry:
    """A public name: where users find it (`weft.replicate`), and where it is defined."""

    name: str
    module: str
    """The module that defines it: weft.data_parallel.replicate."""
    qualname: str
    """Its name there."""

    @property
    def path(self) -> str:
        return f"{self.module}.{self.qualname}"

    @property
    def file(self) -> str:
        """The file of the repository that defines it."""
        return str(_file_of(self.module).relative_to(ROOT))


def list_entries(namespace: Namespace) -> list[Entry]:
    """What the namespace's page describes, in the order of `__all__`.

    What another page describes is left out. What has several names is described under that of its definition.
    """
    entries = [entry for entry in _own_entries(namespace) if _described_by(entry.path) is namespace]
    by_path = {entry.path: entry for entry in entries}
    by_path |= {entry.path: entry for entry in entries if entry.name.endswith(f".{entry.qualname}")}
    return [entry for entry in entries if by_path[entry.path] is entry]


def list_parts(namespace: Namespace) -> list[tuple[str, list[Entry]]]:
    """Its submodules that users import from, and the names of each."""
    return [
        (part, [_resolve(f"{namespace.name}.{part}", name) for name in _public(f"{namespace.name}.{part}")])
        for part in namespace.parts
    ]


def list_top_level() -> list[Entry]:
    """The names of `weft` itself that are no modules."""
    return [_resolve("weft", name) for name in _public("weft") if not is_module(f"weft.{name}")]


def find_files() -> set[str]:
    """The files that define what the reference describes."""
    entries = [entry for namespace in NAMESPACES for entry in list_entries(namespace)]
    parts = [entry for namespace in NAMESPACES for _, found in list_parts(namespace) for entry in found]
    return {entry.file for entry in entries + parts}


def is_described(dotted: str) -> bool:
    """Whether the reference has this name (`weft.comm.all_reduce`), or what it is an attribute of."""
    if dotted == "weft.__version__":
        return True  # a text without a docstring: the page on versions has it
    module = dotted.rpartition(".")[0]
    spaces = {namespace.name for namespace in NAMESPACES} | {
        f"{namespace.name}.{part}" for namespace in NAMESPACES for part in namespace.parts
    }
    if dotted in spaces or dotted == "weft":
        return True
    if module == "weft":
        return any(entry.name == dotted for entry in list_top_level())
    for namespace in NAMESPACES:
        in_parts = [entry for _, found in list_parts(namespace) for entry in found]
        if any(entry.name == dotted for entry in [*_own_entries(namespace), *in_parts]):
            return True
    return bool(module) and module not in spaces and is_described(module)


# -- resolving -----------------------------------------------------------------------


def _own_entries(namespace: Namespace) -> list[Entry]:
    names = [name for name in _public(namespace.name) if name not in namespace.internal]
    entries = [_resolve(namespace.name, name) for name in names if not is_module(f"{namespace.name}.{name}")]
    return entries + [_resolve(*f"{namespace.name}.{name}".rsplit(".", 1)) for name in namespace.shown]


@cache
def _described_by(path: str) -> Namespace:
    """The first namespace that has it describes it."""
    return next(
        namespace for namespace in NAMESPACES if any(entry.path == path for entry in _own_entries(namespace))
    )


def _public(module: str) -> list[str]:
    """`__all__` of a module without private names; all that it defines, where it has none."""
    tree = _parse(module)
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [name for name in ast.literal_eval(node.value) if not name.startswith("_")]
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def _resolve(module: str, name: str) -> Entry:
    where, found = _find_definition(module, name)
    return Entry(f"{module}.{name}", where, found)


def _find_definition(module: str, name: str) -> tuple[str, str]:
    tree = _parse(module)
    # weft itself imports its names for type checkers alone, in a block.
    blocks = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.If))]
    for node in itertools.chain(*blocks):
        if isinstance(node, ast.ImportFrom) and node.module and node.module != module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _find_definition(node.module, alias.name)
    return module, name


def is_module(dotted: str) -> bool:
    """Whether a package's name is a module, not what the package imports from a module of the same name."""
    package, _, name = dotted.rpartition(".")
    return _exists(dotted) and _find_definition(package, name) == (package, name)


def _exists(module: str) -> bool:
    path = SRC.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def _file_of(module: str) -> Path:
    path = SRC.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def _parse(module: str) -> ast.Module:
    return ast.parse(_file_of(module).read_text())


def describe(entry: Entry) -> str:
    """The first line of its docstring."""
    for node in _parse(entry.module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == entry.qualname:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""


def read_docstring(module: str) -> str:
    """A module's docstring."""
    return ast.get_docstring(_parse(module)) or ""


# -- pages ---------------------------------------------------------------------------


def make_pages() -> Iterator[tuple[str, str]]:
    """The reference: each page's name and Markdown."""
    yield "api/weft.md", _make_overview()
    for namespace in NAMESPACES:
        yield namespace.page, _make_page(namespace)


def _make_overview() -> str:
    lines = [
        "# `weft`",
        read_docstring("weft"),
        "All names of `import weft`. Names of a namespace are on its page.",
        _make_table(list_top_level()),
        "## Namespaces",
        "\n".join(
            f"- [`{namespace.name}`]({namespace.name}.md): {read_docstring(namespace.name).splitlines()[0]}"
            for namespace in NAMESPACES
        ),
    ]
    return "\n\n".join(lines) + "\n"


def _make_page(namespace: Namespace) -> str:
    entries, parts = list_entries(namespace), list_parts(namespace)
    elsewhere = [entry for entry in _own_entries(namespace) if entry not in entries]
    lines = [f"# `{namespace.name}`", read_docstring(namespace.name)]
    if namespace.guide:
        title = re.findall(r"^# (.*)$", (ROOT / "docs" / namespace.guide).read_text(), flags=re.MULTILINE)[0]
        lines.append(f"How it is used: [{title}](../{namespace.guide}).")
    lines.append(_make_table(entries + elsewhere))
    lines += [_make_directive(entry, 2) for entry in entries]
    for part, found in parts:
        lines += [f"## `{namespace.name}.{part}`", read_docstring(f"{namespace.name}.{part}")]
        lines += [_make_directive(entry, 3) for entry in found]
    return "\n\n".join(line for line in lines if line) + "\n"


def _make_table(entries: list[Entry]) -> str:
    rows = [f"| [`{entry.name.rpartition('.')[2]}`][{entry.path}] | {describe(entry)} |" for entry in entries]
    return "\n".join(["| name | |", "|---|---|", *rows]) if rows else ""


def _make_directive(entry: Entry, level: int) -> str:
    name = entry.name.rpartition(".")[2]
    options = f"heading: {name}\n      toc_label: {name}\n      heading_level: {level}"
    if entry.path in OPAQUE:
        options += "\n      members: false"
    return f"::: {entry.path}\n    options:\n      {options}"
