"""Processes that a test leads by the hand, step by step: a crew.

Each member does what it is told, any number of things at once, and reports. The crew's wires are no part of
RPC, so a test can wait for what happens on a member, kill it, and ask the others, all from outside.
Members are forked from a server that has torch and weft.rpc loaded, so that one starts in a moment.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.rpc.acts import join

ANSWER_SECS = 60.0


class MemberGone(Exception):
    """The member ended before it had answered."""


def fork_server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["weft.rpc", "tests.rpc.crew", "tests.rpc.kills"])
    return context


def serve(orders: Connection, before: Callable[[], None] | None) -> None:
    """Run what arrives, each on a thread of its own, until the wire is cut.

    `before` runs on the main thread, which all others come from.
    """
    os.environ.pop("RANK", None)
    os.environ.pop("WORLD_SIZE", None)
    # What a member says goes nowhere: its errors are reported, and many are meant to happen.
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (for as long as the process lives)
    lock = threading.Lock()
    if before is not None:
        before()

    def work(number: int, act: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            report = (number, True, act(*args, **kwargs))
        except BaseException as error:
            error.add_note(f"in a member of the crew:\n{traceback.format_exc()}")
            report = (number, False, error)
        try:
            data = pickle.dumps(report)
        except Exception:
            data = pickle.dumps((number, False, RuntimeError(f"can't be sent: {report}")))
        with lock, suppress(OSError):
            orders.send_bytes(data)

    while True:
        try:
            number, act, args, kwargs = orders.recv()
        except (EOFError, OSError):
            os._exit(0)
        name = f"crew-{number}"
        threading.Thread(target=work, args=(number, act, args, kwargs), name=name, daemon=True).start()


class Member:
    """One process of a crew."""

    def __init__(self, context: Any, before: Callable[[], None] | None = None) -> None:
        self._wire, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, before), daemon=True)
        self._process.start()
        theirs.close()
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._num_orders = 0
        self._is_gone = False
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Have it done; the future has the result, the exception, or MemberGone."""
        future: Future[Any] = Future()
        with self._lock:
            if self._is_gone:
                raise MemberGone(f"process {self.pid} is gone")
            self._num_orders += 1
            self._pending[self._num_orders] = future
            self._wire.send((self._num_orders, act, args, kwargs))
        return future

    def do(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.begin(act, *args, **kwargs).result(ANSWER_SECS)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it without a word, and wait until it has."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._process.join(ANSWER_SECS)

    def wait_exit(self, secs: float = ANSWER_SECS) -> int | None:
        self._process.join(secs)
        return self._process.exitcode

    def close(self) -> None:
        self.kill()
        self._process.close()
        self._wire.close()

    def _read(self) -> None:
        with suppress(EOFError, OSError, TypeError):  # TypeError: closed in the middle of a read
            while True:
                number, is_ok, value = pickle.loads(self._wire.recv_bytes())
                with self._lock:
                    future = self._pending.pop(number)
                future.set_result(value) if is_ok else future.set_exception(value)
        with self._lock:
            self._is_gone = True
            pending = list(self._pending.values())
            self._pending.clear()
        for future in pending:
            future.set_exception(MemberGone("it ended before it had answered"))


class Crew:
    """Some members, in a context; at the end none of their processes is left."""

    def __init__(self, size: int) -> None:
        self._context = fork_server()
        self._folder = tempfile.TemporaryDirectory()
        self._num_meetings = 0
        self.members: list[Member] = []
        try:
            for _ in range(size):
                self.add()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getitem__(self, index: int) -> Member:
        return self.members[index]

    def __len__(self) -> int:
        return len(self.members)

    def add(self, before: Callable[[], None] | None = None) -> Member:
        """One more process, which may do something before all else; its place in the crew is the next."""
        member = Member(self._context, before)
        self.members.append(member)
        return member

    def meeting(self, scheme: str = "file") -> str:
        """An init_method that nobody has used. With tcp, rank 0 hosts it."""
        if scheme == "tcp":
            with socket.create_server(("127.0.0.1", 0)) as listening:
                return f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        self._num_meetings += 1
        return f"file://{Path(self._folder.name) / f'store{self._num_meetings}'}"

    def join(self, **options: Any) -> str:
        """All init_rpc, as worker0, worker1 and so on of one world; the init_method they used."""
        init_method = self.meeting()
        size = len(self.members)
        joining = [
            member.begin(join, f"worker{rank}", rank, size, init_method, **options)
            for rank, member in enumerate(self.members)
        ]
        for future in joining:
            future.result(ANSWER_SECS)
        return init_method

    def every(self, act: Callable[..., Any], *args: Any) -> list[Any]:
        """All members do it at the same time."""
        futures = [member.begin(act, *args) for member in self.members]
        return [future.result(ANSWER_SECS) for future in futures]

    def close(self) -> None:
        for member in self.members:
            with suppress(ProcessLookupError):
                member.signal(signal.SIGKILL)
        for member in self.members:
            member.close()
        self.members.clear()
        self._folder.cleanup()
