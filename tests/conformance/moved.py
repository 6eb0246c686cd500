"""Load one of torch's test modules, with the CPU in the GPU's place where a suite says so.

Many tests need a GPU only by name: `model.cuda(rank)`, `device="cuda"`, `device_ids=[rank]`. Their text is
rewritten as it is loaded, so that torch itself, and weft, see a machine as it is. Lines stay where they are:
a traceback points into the file that torch ships.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
import types
from contextlib import nullcontext
from functools import cache
from importlib.machinery import ModuleSpec
from typing import Any

import torch

from tests.conformance.source import decorator_name

# They ask for a number of GPUs; what that says about ranks source.py has read.
GPU_GATES = {"nccl_skip_if_lt_x_gpu", "skip_if_lt_x_gpu", "skip_if_no_gpu"}

# The names under which the rewritten code finds what is below.
MOVE = "_on_cpu"
FAKE_CUDA = "_cuda_on_cpu"


def load_fresh(name: str, is_moved: bool) -> types.ModuleType:
    """Import the module `name`, moved to the CPU or as it is, and anew: with globals nobody has touched."""
    spec, code = _compile(name, is_moved)
    module = importlib.util.module_from_spec(spec)
    module.__dict__[MOVE] = on_cpu
    module.__dict__[FAKE_CUDA] = CudaOnCpu()
    sys.modules[name] = module
    exec(code, module.__dict__)
    # It counts GPUs where it is defined, in a module that stays as it is.
    if is_moved and hasattr(module, "init_multigpu_helper"):
        module.__dict__["init_multigpu_helper"] = one_device_for_each_rank
    return module


@cache
def _compile(name: str, is_moved: bool) -> tuple[ModuleSpec, types.CodeType]:
    assert name not in sys.modules, f"conformance: {name} was imported before its names could be replaced"
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"conformance: no module {name}"
    assert spec.origin is not None, f"conformance: the module {name} has no file"
    with open(spec.origin) as file:
        tree = ast.parse(file.read(), spec.origin)
    tree = move_to_cpu(tree) if is_moved else tree
    return spec, compile(tree, spec.origin, "exec", dont_inherit=True)


def move_to_cpu(tree: ast.Module) -> ast.Module:
    """Rewrite a test file so that it asks for no GPU."""
    return ast.fix_missing_locations(CpuRewriter().visit(tree))


def on_cpu(device: Any) -> Any:
    """The CPU for what means a GPU (an index, "cuda:1", a device); anything else as it is: a dtype, say."""
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device("cpu")
    if isinstance(device, str) and re.fullmatch(r"cuda(:\d+)?", device):
        return "cpu"
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device


def one_device_for_each_rank(world_size: int, backend: str) -> dict[int, list[int]]:
    """What torch's tests look up to learn which GPUs a rank has."""
    return {rank: [rank] for rank in range(world_size)}


class CpuRewriter(ast.NodeTransformer):
    """The rewriting: `.cuda()`, `torch.cuda`, devices as arguments, and what skips a test without GPUs."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [gate for gate in node.decorator_list if not _is_gate(gate)]
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if _is_torch(node.value) and node.attr == "cuda":
            return ast.copy_location(ast.Name(FAKE_CUDA, ast.Load()), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node.args = [_move_text(argument) for argument in node.args]
        for keyword in node.keywords:
            if keyword.arg in ("device_ids", "output_device"):
                keyword.value = ast.copy_location(ast.Constant(None), keyword.value)
            elif keyword.arg == "device":
                keyword.value = _call(MOVE, keyword.value)
            else:
                keyword.value = _move_text(keyword.value)
        if isinstance(node.func, ast.Attribute):
            if node.func.attr == "cuda":
                node.func.attr, node.args, node.keywords = "cpu", [], []
            elif node.args and (
                node.func.attr == "to" or (node.func.attr == "device" and _is_torch(node.func.value))
            ):
                node.args[0] = _call(MOVE, node.args[0])
        return node


class CudaOnCpu:
    """What the tests use of torch.cuda: one device for each rank, and streams that are none."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_device(self, device: object) -> None:
        pass

    def synchronize(self, device: object = None) -> None:
        pass

    def Stream(self, device: object = None) -> torch.cpu.Stream:
        return torch.cpu.Stream()

    def stream(self, stream: object) -> nullcontext[None]:
        return nullcontext()


def _is_gate(decorator: ast.expr) -> bool:
    """Whether it skips a test for want of GPUs, or on any Linux machine whatever the backend.

    The latter is how tests that fail on torch's machines now and then are switched off. They run here.
    """
    name = decorator_name(decorator)
    if name in ("skipIf", "skip_but_pass_in_sandcastle_if") and isinstance(decorator, ast.Call):
        return ast.unparse(decorator.args[0]) in ("True", "IS_LINUX", "IS_LINUX or TEST_WITH_ROCM")
    return name in GPU_GATES or name in ("skip", "skip_but_pass_in_sandcastle")


def _is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


def _move_text(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        moved = "gloo" if node.value == "nccl" else on_cpu(node.value)
        return ast.copy_location(ast.Constant(moved), node)
    return node


def _call(function: str, argument: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Call(ast.Name(function, ast.Load()), [argument], []), argument)
