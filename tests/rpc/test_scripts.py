"""Scripts: functions and classes of __main__ are called, in each way that a script is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

REPO = Path(__file__).parents[2]

# What every script has: things of its own main module, called on the other worker.
THINGS = """
import os
import sys
from weft import rpc

class Thing:
    made = 0
    def __init__(self, value):
        self.value = value
        Thing.made += 1
    def bump(self, by=1):
        self.value += by
        return self.value

class OwnError(ValueError):
    pass

def where():
    return rpc.get_worker_info().name, os.getpid()

def double(thing):
    assert isinstance(thing, Thing)
    return Thing(thing.value * 2)

def fail(text):
    raise OwnError(text)

def call_other(me, is_process=True):
    other = f"worker{1 - me}"
    name, pid = rpc.rpc_sync(other, where)
    assert name == other, name
    assert (pid != os.getpid()) == is_process
    doubled = rpc.rpc_sync(other, double, (Thing(4),))
    assert type(doubled) is Thing and doubled.value == 8
    rref = rpc.remote(other, Thing, (5,))
    assert rref.rpc_sync().bump(by=2) == 7
    assert isinstance(rref.to_here(), Thing)
    assert rpc.rpc_async(other, lambda x: x + me, (1,)).wait() == 1 + me
    try:
        rpc.rpc_sync(other, fail, ("of main",))
    except OwnError as error:
        assert error.args == ("of main",)
    else:
        raise AssertionError("no error came")
"""

LAUNCHED = """
import torch.distributed as dist
import weft

def body(is_process):
    rpc.init_rpc(f"worker{dist.get_rank()}")
    call_other(dist.get_rank(), is_process)
    rpc.shutdown()
    return dist.get_rank()

for kind in ["process", "thread"]:
    assert weft.launch(body, ranks=2, kind=kind, timeout=60, args=(kind == "process",)) == [0, 1]
print("launched")
"""

UNDER_TORCHRUN = """
rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}")
assert rpc.get_worker_info().id == rank
call_other(rank)
rpc.shutdown()
os.write(1, f"rank {rank} done\\n".encode())  # at once: the other rank writes too
"""

SPAWNED = """
import multiprocessing

def work(rank, init_method):
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    call_other(rank)
    rpc.shutdown()

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=work, args=(1, sys.argv[1]))
    child.start()
    work(0, sys.argv[1])
    child.join(60)
    assert child.exitcode == 0
    print("spawned")
"""

FORGETFUL = """
rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}")
held = rpc.remote(f"worker{1 - rank}", Thing, (5,))
assert held.to_here().value == 5
if rank == 0:
    assert rpc.api._all_gather("ready") == {"worker0": "ready", "worker1": "ready"}
else:
    rpc.api._all_gather("ready")
os.write(1, f"rank {rank} forgets\\n".encode())
"""


def run(tmp_path: Path, body: str, starter: list[str], args: list[str]) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(THINGS + body)
    done = subprocess.run(
        [sys.executable, *starter, str(script), *args],
        env=os.environ | {"PYTHONPATH": str(REPO / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.split("\n"))[1:]


@pytest.mark.full
def test_a_script_that_launches(tmp_path: Path) -> None:
    assert run(tmp_path, LAUNCHED, [], []) == ["launched"]


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.full
def test_a_script_under_torchrun(tmp_path: Path) -> None:
    assert run(tmp_path, UNDER_TORCHRUN, TORCHRUN, []) == ["rank 0 done", "rank 1 done"]


@pytest.mark.full
def test_a_script_that_spawns_its_peer(tmp_path: Path) -> None:
    """One worker's main module is __main__, the other's is __mp_main__."""
    assert run(tmp_path, SPAWNED, [], [f"file://{tmp_path / 'store'}"]) == ["spawned"]


def test_a_script_that_forgets_to_shut_down_ends(tmp_path: Path) -> None:
    assert run(tmp_path, FORGETFUL, TORCHRUN, []) == ["rank 0 forgets", "rank 1 forgets"]
