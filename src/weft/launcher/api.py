"""`launch`: N ranks from a script, a notebook or a test, in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from weft.comm import desync_check as checking
from weft.launcher.backends import announce_engine, resolve_local_engine
from weft.launcher.options import check_function, check_kind, check_ranks, check_timeouts
from weft.launcher.payload import encode_call
from weft.launcher.pool import RankPool
from weft.launcher.threads import run_threads
from weft.torch_private import check_torch


def launch(
    fn: Callable[..., Any],
    *,
    ranks: int = 2,
    kind: Literal["process", "thread"] = "process",
    backend: str | None = None,
    timeout: float | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    collective_timeout: float = 300.0,
    grace: float = 5.0,
    desync_check: bool = False,
) -> list[Any]:
    """Run `fn(*args, **kwargs)` on each of `ranks` ranks and return the results by rank.

    Inside `fn`, torch.distributed is initialised: `dist.get_rank()` and all else work.

    `kind`: "process" starts fresh interpreters. The caller's main module is not imported again, so a
    script needs no `__main__` guard; functions and classes of a script or a notebook travel by value.
    "thread" runs the ranks as threads of this process: no start-up and no pickling, for tests and
    notebooks. They share the process: its random generator (ranks draw from one stream, in whatever
    order they come), its environment variables, its modules, and the arguments themselves.

    `backend`: as for init_process_group; by default "cpu:gloo,cuda:nccl" for processes with a GPU each, else
    "weft" on Linux and "gloo" elsewhere. A line on stderr says which and why. "nccl" works with fewer GPUs
    than ranks too, slowly, for tests.
    `timeout`: seconds for the whole run, from the moment that all ranks are ready; None for no limit.
    `collective_timeout`: seconds that one collective may wait for its peers.
    `grace`: seconds that ranks get to end by themselves after another has failed.
    `desync_check`: compare every collective of weft.comm between ranks before it moves data.

    Raises LaunchError, with every rank's traceback, when a rank raises or dies; the first cause leads
    and is the `__cause__`. Ranks still running after the grace are killed, and the error says where they
    were. Raises LaunchTimeoutError, with every unfinished rank's stack, when the timeout passes. A thread
    can't be killed: the error then says that it still runs. `sys.exit(0)` in `fn` counts as returning
    None; any other exit code is a failure, and so is `os._exit`.
    """
    check_torch()
    check_function(fn, "launch")
    check_ranks(ranks, "launch")
    check_kind(kind, "launch")
    check_timeouts("launch", collective_timeout=collective_timeout, grace=grace)
    if timeout is not None:
        check_timeouts("launch", timeout=timeout)
    choice = resolve_local_engine(backend, ranks, "launch", are_threads=kind == "thread")
    fn = partial(_run_checked, fn) if desync_check else fn
    if kind == "thread":
        announce_engine(ranks, choice)
        return run_threads(
            lambda: fn(*args, **(kwargs or {})),
            ranks,
            backend=choice.backend,
            timeout_secs=timeout,
            collective_timeout_secs=collective_timeout,
            grace_secs=grace,
        )
    call = encode_call(fn, args, kwargs or {})  # before a process is started: what can't be pickled ends here
    with RankPool(ranks, grace=grace) as pool:
        return pool.run_encoded(call, backend=backend, timeout=timeout, collective_timeout=collective_timeout)


def _run_checked(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with checking():
        return fn(*args, **kwargs)
