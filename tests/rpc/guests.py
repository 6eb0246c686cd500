"""What workers try whose peer allows them little, and who they pretend to be."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.rpc.remote_functions import Counter, add, give
from tests.rpc.strangers import Bomb
from weft import rpc


def set_variable(name: str, value: str) -> None:
    os.environ[name] = value


def set_temporary_folder(path: str) -> None:
    tempfile.tempdir = path


def become_nobody() -> None:
    """For all threads of the process: that is what setresuid of Python's os does."""
    # What nobody is to do is imported before: this checkout may lie where only its owner can read.
    import_module("tests.rpc.floods")
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)


def send_bomb(to: str, function: Callable[..., Any], flag: Path) -> Any:
    """Made here: on the crew's own wire it would go off here."""
    return rpc.rpc_sync(to, function, (Bomb(flag),))


def read_store(init_method: str) -> list[bytes]:
    """All that is told at a meeting place of scheme tcp."""
    host, port = init_method.removeprefix("tcp://").split(":")
    store = dist.TCPStore(host, int(port), None, False)
    if not hasattr(store, "list_keys"):
        pytest.skip("this torch's stores don't list their keys")
    return [store.get(key) for key in store.list_keys()]


def add_tensors(to: str) -> list[float]:
    return rpc.rpc_sync(to, torch.add, (torch.ones(2), 1)).tolist()


def use_counter(to: str) -> int:
    rref = rpc.remote(to, Counter, (5,))
    rref.rpc_sync().bump(3)
    return rref.rpc_sync().get()


def has_imported(name: str) -> bool:
    return name in sys.modules


def try_by_value(to: str) -> list[str]:
    """Functions that travel by value, partials, dotted names: all the ways round the list."""
    attempts: list[Any] = [
        (lambda: 3, ()),
        (functools.partial(add, 1), (2,)),
        (functools.partial(os.getpid), ()),
        (add.__class__.__call__, (add, 1, 2)),
        (Counter.__init__.__globals__["os"].getpid, ()),
    ]
    texts: list[str] = []
    for function, args in attempts:
        try:
            texts.append(f"returned {rpc.rpc_sync(to, function, args)}")
        except weft.RefusedError as error:
            texts.append(str(error))
    return texts


def give_large(to: str, num_elements: int) -> list[float]:
    """A tensor there and back that is too large for a message of the usual way; its ends."""
    given = rpc.rpc_sync(to, give, (torch.arange(float(num_elements)),))
    return [given[0].item(), given[-1].item()]
