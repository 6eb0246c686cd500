"""Every private name of torch that weft uses is on the list, and what is listed is used where it says."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable

import pytest

from tests.repo.source import Source, chain_of, find_aliases, find_references, read_package
from weft.torch_private import PRIVATE_NAMES, PrivateNames

# The list itself, and attributes that weft puts on objects of torch's and Python's.
LIST = "torch_private/"
OWN_PREFIX = "_weft"
OF_PYTHON = {"_fields"}  # of named tuples
BY_NAME = ("getattr", "hasattr", "setattr", "delattr")

Uses = dict[str, set[str]]  # what is used, a dotted path or the name of an attribute -> by which files


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def find_paths(sources: Iterable[Source]) -> Uses:
    """Dotted paths of torch with a private part, as far as imports tell: the longest of each."""
    uses: Uses = defaultdict(set)
    for source in sources:
        names = {reference.name for reference in find_references(source)}
        for name in names:
            is_torchs = name.startswith("torch.") and any(map(is_private, name.split(".")))
            if is_torchs and not any(other.startswith(f"{name}.") for other in names):
                uses[name].add(source.path)
    return uses


def find_attributes(sources: Iterable[Source]) -> Uses:
    """Private attributes of objects whose kind the text doesn't tell, but for names that weft defines."""
    sources = list(sources)
    own = {name for source in sources for name in find_definitions(source)}
    uses: Uses = defaultdict(set)
    for source in sources:
        aliases = find_aliases(source)
        for node in ast.walk(source.tree):
            name = attribute_of(node, aliases)
            is_own = name is None or name in own or name in OF_PYTHON or name.startswith(OWN_PREFIX)
            if name is not None and not is_own and is_private(name):
                uses[name].add(source.path)
    return uses


def find_definitions(source: Source) -> Iterable[str]:
    """The names that a file gives to something: functions, classes, variables, attributes of `self`."""
    for node in ast.walk(source.tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def attribute_of(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """The attribute that is reached here, by a dot or by its name; None for what is reached by an import."""
    match node:
        case ast.Attribute(attr=name):
            chain = chain_of(node)
            return None if chain and chain[0] in aliases else name
        case ast.Call(func=ast.Name(id=called), args=[_, ast.Constant(value=str(name)), *_]):
            return name if called in BY_NAME else None
    return None


def find_unlisted(paths: Uses, attributes: Uses, entries: Iterable[PrivateNames]) -> list[str]:
    entries = list(entries)
    problems: list[str] = []
    for path, files in paths.items():
        listed = [entry for entry in entries if any(is_part_of(path, own) for own in entry.paths)]
        problems += [f"{file}: {path}" for file in files if not is_used_in(file, listed)]
    for name, files in attributes.items():
        listed = [entry for entry in entries if name in entry.names]
        problems += [f"{file}: .{name}" for file in files if not is_used_in(file, listed)]
    return sorted(problems)


def is_part_of(path: str, listed: str) -> bool:
    """Whether a use is of a listed name, of what is below it, or of a module on the way to it."""
    return f"{path}.".startswith(f"{listed}.") or f"{listed}.".startswith(f"{path}.")


def is_used_in(file: str, entries: Iterable[PrivateNames]) -> bool:
    return any(f"{file}/".startswith(f"{place}/") for entry in entries for place in entry.used_in)


def find_unused(sources: Iterable[Source], entries: Iterable[PrivateNames]) -> list[str]:
    """Listed names that no file says which should use them, and files that say none of an entry's names."""
    words = {source.path: words_of(source) for source in sources}
    problems: list[str] = []
    for entry in entries:
        for place in entry.used_in:
            found = [words[path] for path in words if f"{path}/".startswith(f"{place}/")]
            if not any(said & {*entry.names} for said in found):
                problems.append(f"{place}: none of {', '.join(entry.paths)}")
        said = {word for path in words if is_used_in(path, [entry]) for word in words[path]}
        problems += [f"{path}: nowhere" for path in entry.paths if path.rpartition(".")[2] not in said]
    return problems


def words_of(source: Source) -> set[str]:
    """Every name, and the parts of every dotted string, in a file's code; comments don't count."""
    words: set[str] = set()
    for node in ast.walk(source.tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name):
                words.add(name)
            case ast.ImportFrom(module=module, names=names):
                words |= {part for alias in names for part in alias.name.split(".")} | {
                    *(module or "").split(".")
                }
            case ast.Constant(value=str(text)):
                words |= {*text.split(".")}
    return words


def read_sources() -> list[Source]:
    return [source for source in read_package() if not source.path.startswith(LIST)]


def test_every_private_name_of_torch_is_listed() -> None:
    sources = read_sources()
    assert find_unlisted(find_paths(sources), find_attributes(sources), PRIVATE_NAMES) == []


def test_what_is_listed_is_used_where_the_list_says() -> None:
    assert find_unused(read_sources(), PRIVATE_NAMES) == []


def test_every_entry_is_complete() -> None:
    for entry in PRIVATE_NAMES:
        assert entry.names, entry
        assert entry.used_in, entry
        assert entry.purpose, entry
        assert any(is_private(part) for path in entry.paths for part in path.split(".")), entry
    paths = [path for entry in PRIVATE_NAMES for path in entry.paths]
    assert len(paths) == len(set(paths))


ENTRIES = (
    PrivateNames("torch._C", ("_listed",), "a purpose", ("comm/listed.py",)),
    PrivateNames("torch.Tensor", ("_mark",), "a purpose", ("fsdp",)),
    PrivateNames("torch._dynamo.config", ("optimize",), "a purpose", ("comm/listed.py",)),
)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch._C._unlisted()",
        "from torch._C import _unlisted",
        "from torch import _inductor",
        "import torch._dynamo.utils",
        "from torch._dynamo import config\nconfig.other",
        "import importlib\nimportlib.import_module('torch._inductor.config')",
        "def f(tensor):\n    return tensor._other",
        "def f(tensor):\n    return getattr(tensor, '_other', None)",
        "def f(tensor):\n    tensor._other = 1",
        "def f(tensor):\n    return tensor._mark",  # listed, but for another folder
    ],
)
def test_an_unlisted_name_is_found(text: str) -> None:
    sources = [Source("comm/listed.py", text)]
    assert len(find_unlisted(find_paths(sources), find_attributes(sources), ENTRIES)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("comm/listed.py", "import torch\ntorch._C._listed(1).more"),
        ("comm/listed.py", "from torch._C import _listed as f\nf()"),
        ("comm/listed.py", "def f():\n    from torch._dynamo import config\n    config.optimize"),
        ("fsdp/deep/file.py", "def f(tensor):\n    return tensor._mark"),
        (
            "comm/other.py",
            "class A:\n    def __init__(self):\n        self._own = 1\n\ndef f(a):\n    return a._own",
        ),
        ("comm/other.py", "import os\nos._exit(1)"),
        ("comm/other.py", "import torch\ntorch.Tensor.__len__"),
        ("comm/other.py", "def f(a):\n    return a._weft_mark"),
    ],
)
def test_listed_names_and_those_of_others_pass(path: str, text: str) -> None:
    sources = [Source(path, text)]
    assert find_unlisted(find_paths(sources), find_attributes(sources), ENTRIES) == []


def test_a_listed_name_without_a_use_is_found() -> None:
    source = Source("comm/listed.py", '"""_listed is not used."""\nimport torch\ntorch._C._gone')
    assert find_unused([source], ENTRIES[:1]) == [
        "comm/listed.py: none of torch._C._listed",
        "torch._C._listed: nowhere",
    ]
