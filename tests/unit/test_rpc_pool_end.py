"""The end of the pool: no thread of it runs on, however late it is."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from weft.rpc.bell import own_bell
from weft.rpc.pool import Pool


class Ear:
    """Hears nothing."""

    def __init__(self) -> None:
        self.is_closing = False
        self.bell = own_bell(0)

    def has_mail(self) -> bool:
        return False

    def take(self) -> None:
        return None


def test_threads_that_are_on_their_way_out_are_waited_for() -> None:
    ear, held, threads = Ear(), threading.Event(), list[threading.Thread]()
    at_the_door = threading.Semaphore(0)

    @contextmanager
    def enter() -> Generator[None]:
        threads.append(threading.current_thread())
        yield
        at_the_door.release()
        held.wait(10)

    pool = Pool(ear, lambda _: None, enter, lambda: None, 4)
    pool.start()
    ear.is_closing = True
    ear.bell.wake()
    for _ in range(2):
        assert at_the_door.acquire(timeout=10)
    assert pool.num_threads == 0
    threading.Timer(0.05, held.set).start()
    pool.join(10)
    assert not any(thread.is_alive() for thread in threads)
