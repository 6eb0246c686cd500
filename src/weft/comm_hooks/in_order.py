"""Run hooks of several collectives so that every rank launches them in the same order.

Several buckets are under way at once. A hook that needs a second collective after its
first could launch it where the first one ends, in a callback. But ends come in any
order: one rank would launch bucket 0's second collective before bucket 1's first, its
peer after it, and both would wait for ever or mix up data. So a hook of several
collectives is a plain function, its *body*, that launches and waits as it reads. Each
group has one thread that runs bodies one after another, in the order in which the
hooks were called, and that is the order of the buckets, the same on every rank.

Three rules keep it so:
- Where one bucket of a hook goes this way all of them do, sparse ones included
  (`run_in_order`).
- A hook of one collective launches it on the calling thread, unless bodies are still
  under way on the group; then it queues behind them (`launch_in_order`). So hooks of
  both kinds may share a group.
- Whoever else uses the group (buffers, the user) first waits for the futures.

A body never waits for another body of its group: one that is called from a body runs
at once, inside it. Callbacks of the returned futures run on the group's thread too and
must not wait for collectives.

On CUDA bodies run on a stream of their own that is ordered behind what the hook's
caller had launched; whoever waits for the future is ordered behind the body.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.distributed import ProcessGroup, distributed_c10d
from torch.futures import Future

from weft import comm
from weft.comm.call import stand_aside
from weft.errors import StateError

T = TypeVar("T")

# An idle thread ends after this long, and the next body starts another. Steps follow each
# other faster, so a training run keeps its thread (and torch's worker threads below it).
_LINGER_SECS = 10.0
_CLOSE_SECS = 2.0  # at the process's exit, for a body that can't end


def run_in_order(group: ProcessGroup, tensor: torch.Tensor, body: Callable[[], T]) -> Future[T]:
    """Run the body behind those that the group was given before; a future of its result.

    `tensor` is what the body works on: its device says whether streams matter.
    """
    aside: Callable[[Callable[[], T]], T] | None = getattr(group, "run_aside", None)
    if aside is not None:  # a plan's group, which has no other thread to run it on
        return completed(aside(body), tensor)
    return queue_of(group).submit(tensor, body)


def launch_in_order(
    group: ProcessGroup, tensor: torch.Tensor, launch: Callable[[], comm.Handle[T]]
) -> Future[T]:
    """Launch one collective behind the group's bodies: at once if none is under way."""
    queue = _queues.get(group)
    if queue is None or queue.is_idle:
        return launch().future()
    return queue.submit(tensor, lambda: launch().wait())


def finish_in_order(
    group: ProcessGroup, tensor: torch.Tensor, launch: Callable[[], comm.Handle[T]]
) -> Future[T]:
    """The same, done when this returns unless bodies are under way: gloo's reduce-scatter has no futures."""
    queue = _queues.get(group)
    if queue is None or queue.is_idle:
        return _run_now(lambda: launch().wait(), tensor)
    return queue.submit(tensor, lambda: launch().wait())


def is_busy(group: ProcessGroup) -> bool:
    """Whether bodies are under way on the group, so that a launch now must queue behind them."""
    queue = _queues.get(group)
    return queue is not None and not queue.is_idle


def queue_of(group: ProcessGroup) -> BodyQueue:
    """The queue of a group; it lives as long as the group."""
    with _mutex:
        queue = _queues.get(group)
        if queue is None:
            queue = _queues[group] = BodyQueue()
        return queue


@dataclass(frozen=True, slots=True)
class _Task(Generic[T]):
    body: Callable[[], T]
    future: Future[T]
    world: Any  # the calling rank's groups, where ranks are threads
    tensor: torch.Tensor
    ready: Any  # a CUDA event, or None: when the caller's stream has made the tensor
    context: Context  # the caller's: whose the body's collectives are


class Scratch:
    """Memory that bodies use one after another, so that a step allocates nothing."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.device], torch.Tensor] = {}

    def take(self, name: str, num_bytes: int, device: torch.device, group: ProcessGroup) -> torch.Tensor:
        """Bytes that the group reads well, with anything in them; good until the body ends."""
        kept = self._kept.get((name, device))
        if kept is None or kept.numel() < num_bytes:
            self._kept.pop((name, device), None)  # freed before more is asked for
            kept = self._kept[name, device] = comm.allocate((num_bytes,), torch.uint8, device, group)
        return kept[:num_bytes]


class BodyQueue:
    """Runs bodies one after another, on a thread that is there while there is work."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks: deque[_Task[Any]] = deque()
        self._num_unfinished = 0
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.scratch = Scratch()  # for the body that runs

    @property
    def is_idle(self) -> bool:
        """Whether no body is under way or waiting, so that a launch now comes after all of them."""
        return self._num_unfinished == 0 or self._is_inside()

    def submit(self, tensor: torch.Tensor, body: Callable[[], T]) -> Future[T]:
        """Queue the body; from within a body, run it now."""
        if self._is_inside():
            return _run_now(body, tensor)
        is_cuda = tensor.is_cuda
        ready = torch.cuda.current_stream(tensor.device).record_event() if is_cuda else None
        future = _new_future(tensor)
        with self._changed:
            self._tasks.append(_Task(body, future, _current_world(), tensor, ready, copy_context()))
            self._num_unfinished += 1
            if self._thread is None:
                _end_with_process(self)
                self._thread = threading.Thread(target=self._serve, name="weft-hooks", daemon=True)
                self._thread.start()
            self._changed.notify()
        return future

    def close(self, timeout_secs: float) -> None:
        """End the thread when its bodies are done, or leave it to itself after this long."""
        with self._changed:
            self._is_closing = True
            thread = self._thread
            self._changed.notify()
        if thread is not None:
            thread.join(timeout_secs)

    def _is_inside(self) -> bool:
        return self._thread is threading.current_thread()

    def _serve(self) -> None:
        stand_aside()
        while True:
            with self._changed:
                is_called = self._changed.wait_for(lambda: self._tasks or self._is_closing, _LINGER_SECS)
                if not self._tasks and (self._is_closing or not is_called):
                    self._thread = None
                    return
                task = self._tasks.popleft()
            self._run(task)
            del task  # it holds the group, and the wait for the next one may be long

    def _run(self, task: _Task[Any]) -> None:
        is_counted = False
        try:
            with torch.no_grad(), _entered(task.world), self._on_stream(task):
                value = task.context.run(task.body)
                # Counted before the future is complete: whoever waited for it finds the queue idle.
                is_counted = self._finish_one()
                task.context.run(task.future.set_result, value)  # its callbacks are the caller's, too
        except BaseException as error:
            if not is_counted:
                self._finish_one()
            if not task.future.done():
                task.context.run(task.future.set_exception, _as_exception(error))

    def _finish_one(self) -> bool:
        with self._changed:
            self._num_unfinished -= 1
        return True

    @contextmanager
    def _on_stream(self, task: _Task[Any]) -> Generator[None]:
        if task.ready is None:
            yield
            return
        device = task.tensor.device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        stream.wait_event(task.ready)
        # The tensor may be a temporary of the caller's stream: its memory is ours until we are done.
        for part in (
            (task.tensor._indices(), task.tensor._values()) if task.tensor.is_sparse else (task.tensor,)
        ):
            part.record_stream(stream)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield


_running: weakref.WeakSet[BodyQueue] = weakref.WeakSet()


def _end_with_process(queue: BodyQueue) -> None:
    # Python ends a thread that runs at its exit in the middle of torch's code, which aborts the process.
    if not _running:
        atexit.register(_close_all)
    _running.add(queue)


def _close_all() -> None:
    for queue in list(_running):
        queue.close(_CLOSE_SECS)


_queues: weakref.WeakKeyDictionary[ProcessGroup, BodyQueue] = weakref.WeakKeyDictionary()
_mutex = threading.Lock()


def completed(value: T, tensor: torch.Tensor) -> Future[T]:
    """A future that has its value already, made on the current stream."""
    future: Future[T] = _new_future(tensor)
    future.set_result(value)
    return future


def _run_now(body: Callable[[], T], tensor: torch.Tensor) -> Future[T]:
    future: Future[T] = _new_future(tensor)
    try:
        future.set_result(body())
    except Exception as error:
        future.set_exception(error)  # type: ignore[arg-type]
    return future


def _new_future(tensor: torch.Tensor) -> Future[Any]:
    return Future(devices=[tensor.device]) if tensor.is_cuda else Future()


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else StateError(f"a gradient hook was ended by {error!r}.")


def _current_world() -> Any:
    """The groups of the calling rank where ranks are threads, None where they are processes.

    Rank-threads see their own groups through `distributed_c10d._world`, which keeps them in a
    thread-local `entered`. The queue's thread works for one rank at a time and has to see that rank's.
    """
    entered = getattr(distributed_c10d._world, "entered", None)
    return getattr(entered, "world", None)


@contextmanager
def _entered(world: Any) -> Generator[None]:
    if world is None:
        yield
        return
    entered: Any = distributed_c10d._world.entered  # type: ignore[attr-defined]
    entered.world = world
    try:
        yield
    finally:
        del entered.world
