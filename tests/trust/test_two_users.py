"""A job of one user, and what another user of the same host can do to it. Neither of them is root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.rpc.strangers import find_doors
from weft.launcher.stores import free_port

pytestmark = pytest.mark.processes

REPO = Path(__file__).resolve().parents[2]
OWNER, STRANGER = 64_001, 64_002
SECS = 120

# All modules are loaded as root, also those that are imported when they are needed: other users may not be
# able to read them.
BECOME = """
import ctypes, json, os, sys, threading
import torch, torch.distributed as dist
import weft
from weft import rpc
from torch.distributed import rendezvous

def warm_up():
    rpc.init_rpc(f"worker{dist.get_rank()}")
    rpc.rpc_sync(f"worker{1 - dist.get_rank()}", torch.add, (torch.ones(200_000), 1))
    rpc.shutdown()

def become(user):
    weft.launch(warm_up, ranks=2, kind="thread")
    "x".encode("ascii"), "x".encode("idna")
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    assert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0  # dumpable, as a program that this user has started
"""

RANK = (
    BECOME
    + """
become(int(sys.argv[1]))
world = weft.init(timeout=60)
total = torch.ones(500_000)
dist.all_reduce(total)
rpc.init_rpc(f"worker{world.rank}")
print(json.dumps({"pid": os.getpid(), "backend": world.backend}), flush=True)
assert sys.stdin.readline() == "go on\\n"
dist.all_reduce(total)  # read and written in place by the other rank
given = rpc.rpc_sync(f"worker{1 - world.rank}", torch.add, (torch.ones(200_000), 1))
rpc.shutdown()
print(json.dumps([total[-1].item(), given[-1].item()]), flush=True)
"""
)

ATTACK = (
    BECOME
    + """
import socket
from weft.trust import open_peer_memory, read_exposed_secret

user, pids, port, doors = int(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
become(user)
libc = ctypes.CDLL(None, use_errno=True)

def system(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def connect(path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)

class Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

def copy(call, pid):
    buffer = ctypes.create_string_buffer(16)
    here, there = Vector(ctypes.addressof(buffer), 16), Vector(0x400000, 16)
    system(call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0))

attempts = {}
for pid in pids:
    attempts |= {
        f"{name} of {pid}": (lambda name=name, pid=pid: open(f"/proc/{pid}/{name}", "rb").read(1))
        for name in ("environ", "mem", "maps")
    }
    attempts |= {
        f"descriptor {fd} of {pid}": (lambda fd=fd, pid=pid: os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY))
        for fd in range(80)
    }
    attempts[f"descriptors of {pid}"] = lambda pid=pid: os.listdir(f"/proc/{pid}/fd")
    attempts[f"reads memory of {pid}"] = lambda pid=pid: copy(libc.process_vm_readv, pid)
    attempts[f"writes memory of {pid}"] = lambda pid=pid: copy(libc.process_vm_writev, pid)
    attempts[f"traces {pid}"] = lambda pid=pid: system(libc.ptrace(16, pid, None, None))
    attempts[f"takes a descriptor of {pid}"] = lambda pid=pid: system(
        libc.syscall(438, os.pidfd_open(pid), 3, 0)
    )
    attempts[f"stops {pid}"] = lambda pid=pid: os.kill(pid, 19)
    attempts[f"maps memory of {pid}"] = lambda pid=pid: open_peer_memory(pid, 3, 5, 4096)
    attempts[f"reads a secret of {pid}"] = lambda pid=pid: read_exposed_secret([pid, 3, 5])
for door in doors:
    attempts[f"connects to {door}"] = lambda door=door: connect("\\0" + door[1:] if door[0] == "@" else door)

outcomes = {}
for what, attempt in attempts.items():
    try:
        attempt()
    except (OSError, weft.errors.TamperedError) as error:
        outcomes[what] = type(error).__name__
    else:
        outcomes[what] = "done"

# The store lets everybody in. What is in it gives nothing away, and is not believed.
store = dist.TCPStore("127.0.0.1", port, is_master=False)
keys = store.list_keys() if hasattr(store, "list_keys") else []
for key in keys:
    value = store.get(key)
    if value.startswith(b'{"place"'):
        try:
            read_exposed_secret(json.loads(value)["place"])
            outcomes[f"the secret at {key}"] = "done"
        except (OSError, weft.errors.TamperedError) as error:
            outcomes[f"the secret at {key}"] = type(error).__name__
    store.set(key, "a stranger's")
print(json.dumps({"outcomes": outcomes, "keys": len(keys)}))
"""
)


@contextmanager
def ranks_of(user: int, port: int) -> Iterator[list[subprocess.Popen[str]]]:
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TMPDIR": "/tmp"}
    with ExitStack() as stack:
        ranks: list[subprocess.Popen[str]] = []
        for rank in range(2):
            process = subprocess.Popen(
                [sys.executable, "-c", RANK, str(user)],
                cwd=REPO,
                env=os.environ | world | {"RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            ranks.append(process)
        yield ranks


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")
def test_another_user_gets_nothing_of_a_job_and_the_job_goes_on() -> None:
    port = free_port()
    with ranks_of(OWNER, port) as ranks:
        told = [json.loads(rank.stdout.readline()) for rank in ranks if rank.stdout is not None]
        assert [rank["backend"] for rank in told] == ["weft", "weft"]
        pids = [rank["pid"] for rank in told]
        doors = [door.host for pid in pids for door in find_doors(pid) if door.is_unix]
        assert len(doors) >= 2
        arguments = [str(STRANGER), json.dumps(pids), str(port), json.dumps(doors)]
        attack = subprocess.run(
            [sys.executable, "-c", ATTACK, *arguments],
            cwd=REPO,
            capture_output=True,
            text=True,
            timeout=SECS,
        )
        assert attack.returncode == 0, attack.stderr
        seen = json.loads(attack.stdout)
        denied = ("PermissionError", "TamperedError")
        assert {what: how for what, how in seen["outcomes"].items() if how not in denied} == {}
        assert len(seen["outcomes"]) > 180
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go on\n")
            rank.stdin.flush()
        results = [rank.communicate(timeout=SECS)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert [json.loads(result) for result in results] == [[4.0, 2.0]] * 2
