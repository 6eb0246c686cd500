"""Two processes for each library that makes remote calls: one that calls and one that answers.

A pair is started once and lives as long as the run. Its caller waits at a pipe for a block of calls, times
each of them and sends the seconds back, so that whoever measures lets the pairs take turns. The processes of
the others sleep meanwhile. Which cases there are, and what is asked of them, is rpc.py's.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from harness import Candidate, Schedule, time_in_turns
from ranks import ONE_THREAD

CALLER, CALLEE = "caller", "callee"
SIZE = struct.Struct("<Q")


class Work(Enum):
    """What one timed call does; `size` is the block's."""

    NULL = "call a function of no arguments"
    ECHO = "send a tensor of `size` bytes there and back"
    BURST = "start `size` null calls at once, and wait for them all"
    REMOTE = "`size` times: make a value there, and fetch it"


@dataclass(frozen=True)
class Block:
    """Timed calls that a caller makes back to back, after one that isn't timed."""

    work: Work
    size: int
    num_calls: int


class Caller(Protocol):
    """The library in the process that calls."""

    def make_call(self, work: Work, size: int) -> Candidate | None:
        """A call to be timed; None for work that this library doesn't do."""
        ...

    def close(self) -> None:
        """Take leave of the other process."""
        ...


class Library(Protocol):
    """How the two processes of a pair become caller and callee. They share an empty folder."""

    def join_as_caller(self, folder: str) -> Caller: ...

    def join_as_callee(self, folder: str, wait: Callable[[], object]) -> None:
        """Answer calls until `wait` returns."""
        ...


# -- torch.distributed.rpc and weft.rpc, which have the same names -----------------


def null() -> None:
    """What the callee runs."""


def echo(x: torch.Tensor) -> torch.Tensor:
    """What the callee runs."""
    return x


@dataclass(frozen=True)
class RpcLibrary:
    """A module with torch.distributed.rpc's names.

    `options` are those that only it takes. Each process calls `prepare` with its role before it joins.
    """

    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[str], None] | None = None

    def _join(self, role: str, folder: str) -> Any:
        rpc = importlib.import_module(self.module)
        if self.prepare is not None:
            self.prepare(role)
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store", **self.options)
        rank = (CALLER, CALLEE).index(role)
        rpc.init_rpc(role, rank=rank, world_size=2, rpc_backend_options=options)
        return rpc

    def join_as_caller(self, folder: str) -> Caller:
        return RpcCaller(self._join(CALLER, folder))

    def join_as_callee(self, folder: str, wait: Callable[[], object]) -> None:
        rpc = self._join(CALLEE, folder)
        wait()
        rpc.shutdown()


def pose_as_two_hosts(role: str) -> None:
    """Let weft's workers take each other to be elsewhere: no local socket, no shared memory."""
    asking = [module for name, module in sys.modules.items() if name.startswith("weft.rpc.")]
    asking = [module for module in asking if hasattr(module, "this_host")]
    if not asking:
        raise RuntimeError("weft.rpc doesn't call this_host() any more: find out how it knows its host.")
    for module in asking:
        vars(module)["this_host"] = lambda: f"the host of the {role}"


@dataclass(frozen=True)
class RpcCaller:
    """The calling process of such a library. Everything has the library's own defaults."""

    rpc: Any

    def make_call(self, work: Work, size: int) -> Candidate | None:
        match work:
            case Work.NULL:
                return lambda: self.rpc.rpc_sync(CALLEE, null)
            case Work.ECHO:
                return checked_echo(size, lambda x: self.rpc.rpc_sync(CALLEE, echo, (x,)))
            case Work.BURST:
                return lambda: self._burst(size)
            case Work.REMOTE:
                return lambda: self._remote(size)

    def _burst(self, num_calls: int) -> None:
        for future in [self.rpc.rpc_async(CALLEE, null) for _ in range(num_calls)]:
            future.wait()

    def _remote(self, num_calls: int) -> None:
        for _ in range(num_calls):
            self.rpc.remote(CALLEE, null).to_here()

    def close(self) -> None:
        self.rpc.shutdown()


def checked_echo(num_bytes: int, send: Callable[[torch.Tensor], torch.Tensor]) -> Candidate:
    """Raise unless a tensor comes back as it was; else the call to be timed."""
    x = torch.randn(num_bytes // 4)
    back = send(x)
    if not torch.equal(back, x) or back.data_ptr() == x.data_ptr():
        raise RuntimeError(f"an echo of {num_bytes} bytes isn't a copy of what was sent.")
    return lambda: send(x)


# -- Ray, where it is installed ----------------------------------------------------


class RayLibrary:
    """Ray has processes of its own. The callee is an actor, which the caller starts."""

    def join_as_caller(self, folder: str) -> Caller:
        return RayCaller(folder)

    def join_as_callee(self, folder: str, wait: Callable[[], object]) -> None:
        wait()


class RayCaller:
    """The calling process of Ray."""

    def __init__(self, folder: str) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # else it warns of a change to come
        self.ray: Any = importlib.import_module("ray")
        store_bytes = 1 << 29
        self.ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=store_bytes,
            _temp_dir=folder,
        )
        self.actor: Any = self.ray.remote(RayActor).remote()

    def make_call(self, work: Work, size: int) -> Candidate | None:
        ray, actor = self.ray, self.actor
        match work:
            case Work.NULL:
                return lambda: ray.get(actor.null.remote())
            case Work.ECHO:
                return checked_echo(size, lambda x: ray.get(actor.echo.remote(x)))
            case Work.BURST:
                return lambda: ray.get([actor.null.remote() for _ in range(size)])
            case Work.REMOTE:
                return None  # each of its calls is one, as they are: NULL

    def close(self) -> None:
        self.ray.shutdown()


class RayActor:
    """What the callee runs."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def null(self) -> None:
        return null()

    def echo(self, x: torch.Tensor) -> torch.Tensor:
        return echo(x)


# -- a bare socket, the floor ------------------------------------------------------


class SocketLibrary:
    """Bytes through a Unix socket: no function, no pickle, no second thread."""

    def join_as_caller(self, folder: str) -> Caller:
        store = dist.FileStore(f"{folder}/store", 2)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{folder}/socket")
            server.listen()
            store.set("listening", "")
            return SocketCaller(server.accept()[0])

    def join_as_callee(self, folder: str, wait: Callable[[], object]) -> None:
        dist.FileStore(f"{folder}/store", 2).wait(["listening"])
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(f"{folder}/socket")
            while (message := receive(link)) is not None:
                send(link, message)
        wait()


@dataclass(frozen=True)
class SocketCaller:
    """The calling process at its end of the socket."""

    link: socket.socket

    def make_call(self, work: Work, size: int) -> Candidate | None:
        match work:
            case Work.NULL:
                return lambda: self._swap(b"")
            case Work.ECHO:
                return checked_echo(size, lambda x: torch.frombuffer(self._swap(x.numpy()), dtype=x.dtype))
            case _:
                return None

    def _swap(self, message: Any) -> bytearray:
        send(self.link, memoryview(message).cast("B"))
        back = receive(self.link)
        if back is None:
            raise RuntimeError("the callee closed the socket.")
        return back

    def close(self) -> None:
        self.link.close()


def send(link: socket.socket, message: memoryview | bytearray) -> None:
    link.sendall(SIZE.pack(len(message)))
    if message:
        link.sendall(message)


def receive(link: socket.socket) -> bytearray | None:
    """The next message; None where the other end has closed."""
    head = link.recv(SIZE.size, socket.MSG_WAITALL)
    if not head:
        return None
    message = bytearray(SIZE.unpack(head)[0])
    view = memoryview(message)
    while view:
        view = view[link.recv_into(view) :]
    return message


# -- the processes -----------------------------------------------------------------


class Pair:
    """A library's two processes, seen from the one that measures."""

    def __init__(self, name: str, library: Library, folder: Path) -> None:
        self.name = name
        folder.mkdir()
        os.environ.update(ONE_THREAD)
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for run in (run_caller, run_callee):
            here, there = context.Pipe()
            # A daemon: it ends with this process, however that ends.
            process = context.Process(target=run, args=(library, str(folder), there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def time_block(self, block: Block) -> list[float] | None:
        """The seconds of each call; None where the library doesn't do such work."""
        caller = self._pipes[0]
        try:
            caller.send(block)
            answer = caller.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"the calling process of '{self.name}' died; see above.") from error
        if isinstance(answer, str):
            raise RuntimeError(f"'{self.name}' failed:\n{answer}")
        return answer

    def close(self) -> None:
        """End both processes, in good order where they still can."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=20)
            if process.exitcode is None:
                process.kill()
                process.join()


def run_caller(library: Library, folder: str, pipe: Connection) -> None:
    """Be the calling process: time the blocks that come through the pipe until it is closed."""
    torch.set_num_threads(1)
    try:
        caller = library.join_as_caller(folder)
        calls: dict[tuple[Work, int], Candidate | None] = {}
        while (block := receive_block(pipe)) is not None:
            key = (block.work, block.size)
            if key not in calls:
                calls[key] = caller.make_call(*key)
            pipe.send(time_block(calls[key], block.num_calls))
        caller.close()
    except Exception:
        pipe.send(traceback.format_exc())


def run_callee(library: Library, folder: str, pipe: Connection) -> None:
    """Be the answering process, until the pipe is closed."""
    torch.set_num_threads(1)
    library.join_as_callee(folder, lambda: receive_block(pipe))


def receive_block(pipe: Connection) -> Any:
    """The next block to time, of the class that the other end sends; None when the pipe is closed."""
    try:
        return pipe.recv()
    except EOFError:
        return None


def time_block(call: Candidate | None, num_calls: int) -> list[float] | None:
    if call is None:
        return None
    return time_in_turns({"": call}, Schedule(1, num_calls), align=lambda: None)[""]
