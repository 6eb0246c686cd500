"""Importing weft starts nothing and loads little: a process may fork after it, a job loads what it uses."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
import threading

import torch
import weft

assert not torch.cuda.is_initialized()
assert threading.active_count() == 1
# A thread of autograd's engine would be one of the kernel's threads of this process.
threads = {open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")}
assert not any(name.startswith("pt_autograd") for name in threads), threads
child = os.fork()
if child == 0:
    x = torch.ones(2, requires_grad=True)
    (x * 2).sum().backward()
    os._exit(0 if x.grad.tolist() == [2.0, 2.0] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_process_can_be_forked_after_the_import() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


LOADED = """
import sys
import torch
before = {*sys.modules}
import weft
import torch.distributed as dist
assert hasattr(dist.Backend, "WEFT")
assert {name for name in sys.modules if name.startswith("weft")} == {"weft", "weft.first_use", "weft.version"}
assert {name.partition(".")[0] for name in {*sys.modules} - before} == {"weft"}
assert {"launch", "rpc", "Trainer"} <= {*dir(weft)}
weft.launch
tools = ("weft.observe", "weft.planning", "weft.training", "weft.rpc", "weft.fsdp", "weft.__main__")
assert not [name for name in sys.modules if name.startswith(tools)]
assert weft.errors.ConfigError is weft.ConfigError
try:
    weft.nothing
except AttributeError as error:
    assert "has no attribute 'nothing'" in str(error)
else:
    raise AssertionError
"""


def test_a_name_loads_its_module_when_it_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
