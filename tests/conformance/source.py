"""Read torch's test files without importing torch: which tests concern a suite, on how many ranks.

A test concerns a suite when its code, or that of a function, method or class of its file that it uses, names
something that the suite replaces. Reading is enough for that, and collecting the tests stays quick.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from tests.conformance.suites import ShippedTests, Suite

# Decorators that ask for a number of ranks, and for a number of GPUs.
RANK_DECORATORS = {"require_exact_world_size", "require_world_size"}
GPU_DECORATORS = {"nccl_skip_if_lt_x_gpu", "skip_if_lt_x_gpu"}


@dataclass(frozen=True)
class Case:
    """One test of a suite."""

    suite: Suite
    tests: ShippedTests
    test: str
    num_ranks: int
    num_gpus: int = 0
    """Without as many it can't be run."""
    is_namesake: bool = False
    """Whether an earlier class of the suite has a test of this name too."""

    @property
    def name(self) -> str:
        """What lists and tables call it: no two cases of a suite have one name."""
        return f"{self.tests.name}.{self.test}" if self.is_namesake else self.test


@cache
def list_cases(suite: Suite) -> list[Case]:
    """The tests that concern the suite, in the order of the files."""
    cases: list[Case] = []
    for tests in suite.classes:
        taken = {case.test for case in cases}
        cases += [replace(case, is_namesake=case.test in taken) for case in _cases_of_class(suite, tests)]
    return cases


def _cases_of_class(suite: Suite, tests: ShippedTests) -> list[Case]:
    tree = read_tree(tests.module)
    body = find_class(tree, tests.name).body
    functions = [function for function in _functions(body) if function.name.startswith("test_")]
    if not suite.takes_all:
        replaced = find_replaced_names(suite, tree)
        used = {function.name: names_in(function) for function in _functions(body)}
        used |= {node.name: names_in(node) for node in tree.body if isinstance(node, _DEFINITIONS)}
        functions = [function for function in functions if reach(function.name, used) & replaced]
    numbers = find_numbers(tree)
    return [_case(suite, tests, function, numbers) for function in functions]


def _case(suite: Suite, tests: ShippedTests, function: ast.FunctionDef, numbers: dict[str, int]) -> Case:
    num_ranks = max([tests.num_ranks, *asked_numbers(function, RANK_DECORATORS, numbers)])
    num_gpus = max([0, *asked_numbers(function, GPU_DECORATORS, numbers)])
    if suite.is_moved:  # a GPU is a rank on the CPU
        return Case(suite, tests, function.name, max(num_ranks, num_gpus))
    return Case(suite, tests, function.name, num_ranks, num_gpus)


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


def find_numbers(tree: ast.Module) -> dict[str, int]:
    """The module's constants that are numbers."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, int)
    }


def asked_numbers(function: ast.FunctionDef, decorators: set[str], numbers: dict[str, int]) -> Iterable[int]:
    """The numbers that a test's decorators of these names ask for, written out or by a constant's name."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and decorator_name(decorator) in decorators:
            for argument in decorator.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, int):
                    yield argument.value
                elif isinstance(argument, ast.Name) and argument.id in numbers:
                    yield numbers[argument.id]


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
