"""Read torch's test files without importing torch: which tests concern a suite, on how many ranks.

A test concerns a suite when its code, or that of a function, method or class of its file that it uses, names
something that the suite replaces. Reading is enough for that, and collecting the tests stays quick.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.conformance.suites import Suite

# Decorators whose first argument is a number of ranks, or of GPUs with one rank on each.
COUNTING_DECORATORS = {
    "nccl_skip_if_lt_x_gpu",
    "require_exact_world_size",
    "require_world_size",
    "skip_if_lt_x_gpu",
}


@dataclass(frozen=True)
class Case:
    """One test of a suite."""

    suite: Suite
    name: str
    num_ranks: int


@cache
def list_cases(suite: Suite) -> list[Case]:
    """The tests that concern the suite, in the order of the file."""
    tree = read_tree(suite.module)
    replaced = find_replaced_names(suite, tree)
    body = find_class(tree, suite.tests).body
    used = {function.name: names_in(function) for function in _functions(body)}
    used |= {node.name: names_in(node) for node in tree.body if isinstance(node, _DEFINITIONS)}
    return [
        Case(suite, function.name, max([suite.num_ranks, *asked_ranks(function)]))
        for function in _functions(body)
        if function.name.startswith("test_") and reach(function.name, used) & replaced
    ]


def read_tree(module: str) -> ast.Module:
    """Parse a module's source. Only its top package is looked up, so that none is imported."""
    package, *below = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"conformance: there is no package {package}")
    path = Path(spec.submodule_search_locations[0], *below).with_suffix(".py")
    return ast.parse(path.read_text(), str(path))


def find_replaced_names(suite: Suite, tree: ast.Module) -> set[str]:
    """What the file calls the things that the suite replaces."""
    found = {name.split(":")[1] for name in suite.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                alias.asname for alias in node.names if alias.asname and _is_replaced(suite, alias.name)
            }
        elif isinstance(node, ast.ImportFrom):
            found |= {
                alias.asname or alias.name
                for alias in node.names
                if _is_replaced(suite, f"{node.module}.{alias.name}")
            }
    return found


def find_class(tree: ast.Module, dotted: str) -> ast.ClassDef:
    """The class of this dotted name."""
    body: list[ast.stmt] = tree.body
    found = None
    for part in dotted.split("."):
        found = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == part)
        body = found.body
    assert found is not None
    return found


def names_in(node: ast.AST) -> set[str]:
    """The names and attributes in the code below `node`, but for its decorators and its own variables."""
    names: set[str] = set()
    variables: set[str] = set()
    decorators = {id(child) for child in getattr(node, "decorator_list", ())}
    pending = [child for child in ast.iter_child_nodes(node) if id(child) not in decorators]
    while pending:
        child = pending.pop()
        if isinstance(child, ast.Name):
            (names if isinstance(child.ctx, ast.Load) else variables).add(child.id)
        elif isinstance(child, ast.Attribute):
            names.add(child.attr)
        pending += ast.iter_child_nodes(child)
    return names - variables


def reach(start: str, used: dict[str, set[str]]) -> set[str]:
    """The names in the code of `start` and of everything in the file that it uses."""
    seen: set[str] = set()
    pending = [start]
    while pending:
        for name in used.get(pending.pop(), set()) - seen:
            seen.add(name)
            pending.append(name)
    return seen


def asked_ranks(function: ast.FunctionDef) -> Iterable[int]:
    """The numbers of ranks, or of GPUs, that the test's decorators ask for."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and decorator_name(decorator) in COUNTING_DECORATORS:
            for argument in decorator.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, int):
                    yield argument.value


def decorator_name(decorator: ast.expr) -> str:
    """What a decorator is called: the last part of its name."""
    if isinstance(decorator, ast.Call):
        decorator = decorator.func
    if isinstance(decorator, ast.Attribute):
        return decorator.attr
    return decorator.id if isinstance(decorator, ast.Name) else ""


_DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


def _functions(body: list[ast.stmt]) -> list[ast.FunctionDef]:
    return [node for node in body if isinstance(node, ast.FunctionDef)]


def _is_replaced(suite: Suite, name: str) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in suite.modules)
