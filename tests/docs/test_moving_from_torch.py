"""docs/moving_from_torch.md is right: both sides of a row are there and alike, and no name is left out."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "moving_from_torch.md").read_text()
TABLES, MISSING = PAGE.split("## What is missing")
ROWS = re.findall(r"^\| `(torch\.[\w.]+)` \| `(weft\.[\w.]+)` \|$", TABLES, flags=re.MULTILINE)
# The page is about one release. Names that another doesn't have are passed over there.
IS_RELEASE_OF_PAGE = torch.__version__.startswith("2.13.")

HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
AVERAGING = "torch.distributed.algorithms.model_averaging"
REPLACED = (
    "torch.nn.parallel",
    "torch.nn.parallel.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    HOOKS,
    f"{HOOKS}.default_hooks",
    f"{HOOKS}.quantization_hooks",
    f"{HOOKS}.powerSGD_hook",
    f"{HOOKS}.post_localSGD_hook",
    f"{HOOKS}.debugging_hooks",
    f"{HOOKS}.ddp_zero_hook",
    "torch.distributed.algorithms.join",
    f"{AVERAGING}.averagers",
    f"{AVERAGING}.hierarchical_model_averager",
    "torch.distributed.optim",
    "torch.distributed.rpc",
    "torch.distributed.rpc.functions",
    "torch.distributed.nn",
    "torch.distributed.nn.api.remote_module",
    "torch.distributed.autograd",
)

# Those whose arguments have other names, and why.
OTHER_ARGUMENTS = {
    "weft.GradBucket": "torch's is made by C++ only",
    "weft.rpc.functions.async_execution": "a decorator: nobody names its argument",
}

# What releases after the page's have added, and weft has not, or not under a name of its own.
ADDED_SINCE = {
    "lazy_bucket_allocation",  # DistributedDataParallel, torch 2.15
    "param_dtype_override_fn",  # MixedPrecisionPolicy, torch 2.15
    "GradientReductionHandle",  # torch.distributed.fsdp, torch 2.15
}


def load(name: str) -> Any:
    """Do what `from MODULE import NAME` does, or `import MODULE`."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError:
        return importlib.import_module(name)


def load_of_torch(name: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls some of its own modules deprecated
            return importlib.import_module(name) if name in REPLACED else load(name)
    except (AttributeError, ModuleNotFoundError):
        if IS_RELEASE_OF_PAGE:
            raise
        pytest.skip(f"torch {torch.__version__} has no {name}")


def list_public(module: ModuleType) -> list[str]:
    """The public names of a module of torch's: its `__all__`, or what is defined in it."""
    if names := getattr(module, "__all__", None):
        return [name for name in names if hasattr(module, name)]  # some of torch's name what isn't there
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and str(getattr(value, "__module__", "")).startswith(module.__name__)
    ]


def list_arguments(thing: Any) -> set[str] | None:
    """Names of arguments; None where they can't be known, or anything is taken."""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters if not parameter.name.startswith("_")}


def test_the_page_has_rows() -> None:
    assert len(ROWS) > 80
    assert len({row[0] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("theirs", "ours"), ROWS, ids=[row[0] for row in ROWS])
def test_both_sides_of_a_row_are_there_and_alike(theirs: str, ours: str) -> None:
    of_torch, of_weft = load_of_torch(theirs), load(ours)
    assert of_weft is not of_torch
    assert callable(of_weft) == callable(of_torch)
    if ours in OTHER_ARGUMENTS:
        return
    wanted, taken = list_arguments(of_torch), list_arguments(of_weft)
    if wanted is not None and taken is not None:
        assert wanted - taken - ADDED_SINCE == set()


@pytest.mark.parametrize("name", REPLACED)
def test_no_public_name_is_left_out(name: str) -> None:
    listed = {row[0] for row in ROWS}
    missing = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]+`", MISSING))))
    public = list_public(load_of_torch(name))
    assert public
    known = missing | ADDED_SINCE
    assert [one for one in public if f"{name}.{one}" not in listed and one not in known] == []
