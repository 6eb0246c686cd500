"""The installed torch has every private name that is listed for it, and a torch without one is told of."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import weft
from weft import tensor_parallel
from weft.errors import ConfigError
from weft.launcher import launch
from weft.torch_private import NEWEST, OLDEST, PRIVATE_NAMES, PrivateNames, check, check_torch

RELEASE = check.release_of(torch.__version__)
# Objects of the classes whose names only objects have.
SAMPLES: dict[str, Any] = {
    "torch.nn.Module": torch.nn.Module,
    "torch.autograd.graph.Node": lambda: (torch.ones(1, requires_grad=True) * 2).grad_fn,
    "torch.optim.Optimizer": lambda: torch.optim.SGD([torch.ones(1)], lr=0.1),
    "torch._ops.OpOverload": lambda: torch.ops.aten.add.Tensor,
}


def find(owner: str) -> Any:
    """The module or class of a dotted path. Modules first: packages may hold functions of their names."""
    try:
        return importlib.import_module(owner)
    except ModuleNotFoundError:
        above, _, name = owner.rpartition(".")
        return getattr(find(above), name)


def are_there(entry: PrivateNames) -> dict[str, bool]:
    owner = SAMPLES[entry.owner]() if entry.on_instances else find(entry.owner)
    return {path: hasattr(owner, name) for path, name in zip(entry.paths, entry.names, strict=True)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of modules that Inductor imports
@pytest.mark.parametrize("entry", [*check.entries_of(RELEASE)], ids=lambda entry: entry.paths[0])
def test_this_torch_has_what_is_listed_for_it(entry: PrivateNames) -> None:
    assert [path for path, is_there in are_there(entry).items() if not is_there] == []


def test_this_torch_lacks_what_is_listed_for_others() -> None:
    others = [
        entry
        for entry in PRIVATE_NAMES
        if entry not in set(check.entries_of(RELEASE)) and not entry.is_convention
    ]
    found = [path for entry in others for path, is_there in are_there(entry).items() if is_there]
    assert found == [], "`since` or `until` of these is wrong"


def test_the_check_finds_every_name_here() -> None:
    with clean_check():
        check_torch()
    assert [path for entry in check.entries_of(RELEASE) for path in check.find_missing(entry)] == []


@contextmanager
def clean_check() -> Generator[None]:
    """The check as in a process that has not made it yet."""
    check_torch.cache_clear()
    try:
        yield
    finally:
        check_torch.cache_clear()


def body() -> None:
    raise AssertionError("started")


def column() -> tensor_parallel.ParallelStyle:
    return tensor_parallel.ColwiseParallel()


# What a job calls first: one that weft starts, and one whose group was made by torch's own function.
STARTS: dict[str, Callable[[nn.Linear], object]] = {
    "init": lambda layer: weft.init(),
    "launch": lambda layer: launch(body, kind="thread"),
    "ddp": weft.DistributedDataParallel,
    "replicate": weft.replicate,
    "fully_shard": weft.fully_shard,
    "replicate_with_fsdp": weft.replicate_with_fsdp,
    "tensor parallel": lambda layer: tensor_parallel.parallelize_module(layer, Mock(), column()),
    "zero": lambda layer: weft.ZeroRedundancyOptimizer(layer.parameters(), torch.optim.SGD, lr=0.1),
    "rpc": lambda layer: weft.rpc.init_rpc("worker"),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_job_does_not_start_on_a_torch_that_lacks_a_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Linear(2, 2)
    gone = PrivateNames("torch._C", ("_has_gone",), "a purpose", ("comm/door.py", "comm/fresh.py"))
    monkeypatch.setattr(check, "PRIVATE_NAMES", (*PRIVATE_NAMES, gone))
    with clean_check(), pytest.raises(ConfigError) as caught:
        STARTS[name](layer)
    assert type(layer) is nn.Linear
    assert str(caught.value) == (
        f"torch {torch.__version__} lacks torch._C._has_gone, used in comm/door.py, comm/fresh.py of weft. "
        f"weft was tested with torch {OLDEST} to {NEWEST}: install one of these, or a weft made for "
        f"torch {RELEASE}."
    )
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    "path",
    [
        "torch._C._has_gone",
        "torch._has_gone.name",
        "torch.Tensor._has_gone",
        "torch._inductor._has_gone.name",
        "torch._inductor.compile_fx._has_gone",
    ],
)
def test_a_missing_name_is_found(path: str) -> None:
    assert not check.is_there(path)


@pytest.mark.threads
@pytest.mark.parametrize("version", ["2.10.0", "2.99.1+cpu", "3.0.0.dev20270101"])
def test_a_release_beyond_the_tested_is_named_once(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(check, "PRIVATE_NAMES", ())
    with clean_check():
        said = re.escape(f"tested with torch {OLDEST} to {NEWEST}; this is torch {version}")
        with pytest.warns(UserWarning, match=said):
            launch(int, ranks=1, kind="thread")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_torch()


def test_other_ranks_of_torchrun_leave_the_warning_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.1")
    monkeypatch.setattr(check, "PRIVATE_NAMES", ())
    monkeypatch.setenv("RANK", "1")
    with clean_check(), warnings.catch_warnings():
        warnings.simplefilter("error")
        check_torch()


@pytest.mark.parametrize("version", [f"{OLDEST}.0", f"{NEWEST}.9+cu130", f"{NEWEST}.0a0+git1234"])
def test_tested_releases_are_taken_without_a_word(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(check, "PRIVATE_NAMES", ())
    with clean_check(), warnings.catch_warnings():
        warnings.simplefilter("error")
        check_torch()


def test_entries_have_their_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(**rest: str) -> PrivateNames:
        return PrivateNames("torch", ("_name",), "a purpose", ("comm",), **rest)

    always, later, earlier = entry(), entry(since="2.13"), entry(until="2.13")
    monkeypatch.setattr(check, "PRIVATE_NAMES", (always, later, earlier))
    assert list(check.entries_of("2.9")) == [always, earlier]
    assert list(check.entries_of("2.12")) == [always, earlier]
    assert list(check.entries_of("2.13")) == [always, later]
