"""A worker process that has a TensorPost, and does what a test asks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weft.rpc.tensors import Route, TensorPost

PEER_ID = 7
TO_PEER = Route(PEER_ID, "peer", True, {})
TO_TEST = Route(0, "test", True, {})


class Parcel(NamedTuple):
    """What goes from one process to the other."""

    descriptors: Any
    buffers: list[bytes]


class Worker:
    """The state of the process."""

    def __init__(self) -> None:
        self.post = TensorPost(PEER_ID)
        self.held: list[torch.Tensor] = []


class Peer:
    """The process, as the test sees it."""

    def __init__(self) -> None:
        # Forked from a process that has done nothing but import torch, which takes long and is done once so.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, function: Callable[..., Any], *args: object) -> Any:
        """Have the process call `function(worker, *args)`."""
        self._connection.send((function, args))
        is_error, answer = self._connection.recv()
        if is_error:
            raise AssertionError(f"in the peer:\n{answer}")
        return answer

    def kill(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join()

    def stop(self) -> None:
        if self.process.is_alive():
            self._connection.send(None)
            self.process.join()


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    worker = Worker()
    while (request := connection.recv()) is not None:
        function, args = request
        try:
            connection.send((False, function(worker, *args)))
        except Exception:
            connection.send((True, traceback.format_exc()))


def pack(post: TensorPost, tensors: Sequence[torch.Tensor], route: Route) -> Parcel:
    descriptors, buffers = post.pack(tensors, route)
    return Parcel(descriptors, [bytes(buffer) for buffer in buffers])


# What the process can be asked for.


def receive(worker: Worker, parcel: Parcel) -> list[float]:
    """Take tensors and hold them; the answer is what they begin with."""
    got = worker.post.unpack(parcel.descriptors, parcel.buffers, TO_TEST)
    worker.held += got
    return [tensor.reshape(-1)[0].item() for tensor in got]


def receive_and_drop(worker: Worker, parcel: Parcel) -> float:
    (got,) = worker.post.unpack(parcel.descriptors, parcel.buffers, TO_TEST)
    return got.sum().item()


def sums(worker: Worker) -> list[float]:
    return [tensor.sum().item() for tensor in worker.held]


def add(worker: Worker, value: float) -> None:
    for tensor in worker.held:
        tensor.add_(value)


def keep_a_part(worker: Worker) -> None:
    worker.held = [tensor[:3] for tensor in worker.held]


def drop(worker: Worker) -> None:
    worker.held.clear()


def where_are_they(worker: Worker) -> list[str]:
    """What the memory of each held tensor is mapped from."""
    return [mapping_of(tensor.data_ptr()) for tensor in worker.held]


def send_ones(worker: Worker, numel: int) -> Parcel:
    return pack(worker.post, [torch.ones(numel)], TO_TEST)


def send_back(worker: Worker, route: Route) -> Parcel:
    return pack(worker.post, worker.held, route)


def devices(worker: Worker) -> list[str]:
    return [str(tensor.device) for tensor in worker.held]


def blocks_in_use(worker: Worker) -> int:
    return worker.post.num_blocks_in_use


def close(worker: Worker) -> None:
    worker.post.close()


def release_test(worker: Worker) -> None:
    worker.post.release_peer(TO_TEST.peer_id)


def end_a_forked_child(worker: Worker) -> int:
    """Fork; the child drops the tensors and ends."""
    pid = os.fork()
    if pid == 0:
        worker.held.clear()
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def own_rss_bytes(worker: Worker) -> int:
    return rss_bytes()


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def mapping_of(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5) if len(line.split()) > 5 else [*line.split(), ""]
        start, end = (int(bound, 16) for bound in span.split("-"))
        if start <= address < end:
            return name
    return ""


def num_mapped() -> int:
    """How many pieces of weft's shared memory this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:weft")


def num_files() -> int:
    """How many descriptors of weft's shared memory this process has open."""
    files = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return sum("memfd:weft" in file for file in files)
