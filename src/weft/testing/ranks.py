"""`@on_ranks`: a test whose body runs on every rank.

    @on_ranks(2)
    def test_sum():
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == dist.get_world_size()

It stays a plain pytest function: parameters and fixtures work, and their values go
to every rank (to process-ranks as copies, so they must pickle).
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from weft.errors import LaunchError
from weft.launcher.api import launch
from weft.launcher.options import check_kind, check_ranks
from weft.testing.pool import shared_pool

# As in warnings.filters: action, message, category, module, line.
WarningFilter = tuple[Any, Any, type[Warning], Any, int]

F = TypeVar("F", bound=Callable[..., Any])


def on_ranks(
    ranks: int,
    *,
    kind: Literal["thread", "process"] = "thread",
    backend: str | None = None,
    timeout: float | None = 60.0,
) -> Callable[[F], F]:
    """Run the decorated test on each of `ranks` ranks; it fails, with every rank's traceback, if one does.

    Process-ranks come from shared_pool and run the test by value, so that what pytest has made of its
    asserts is what they run, under the same warning filters. A test that a rank skips is skipped, unless
    another fails.
    """
    check_ranks(ranks, "on_ranks")
    check_kind(kind, "on_ranks")

    def decorate(test: F) -> F:
        # It bears the test's module, which is what process-ranks get by value.
        @functools.wraps(test)
        def run_test(filters: Sequence[WarningFilter], args: Any, kwargs: Any) -> RankSkip | None:
            with warnings_filtered(filters):
                try:
                    test(*args, **kwargs)
                except BaseException as error:
                    if not is_skip(error):
                        raise
                    return RankSkip(str(error))
            return None

        @functools.wraps(test)
        def run_on_ranks(*args: Any, **kwargs: Any) -> None:
            try:
                if kind == "process":
                    call = (tuple(warnings.filters), args, kwargs)
                    results = shared_pool(ranks).run(
                        run_test, args=call, backend=backend, timeout=timeout, by_value=True
                    )
                else:
                    results = launch(
                        run_test,
                        ranks=ranks,
                        kind=kind,
                        backend=backend,
                        timeout=timeout,
                        args=((), args, kwargs),
                    )
            except LaunchError as error:
                # The ranks' tracebacks are in its message; the launcher's own would bury them.
                raise error.with_traceback(None) from error.__cause__
            skips = [result for result in results if isinstance(result, RankSkip)]
            if skips:
                sys.modules["pytest"].skip(skips[0].reason)

        return run_on_ranks  # pyright: ignore[reportReturnType]  (it has the test's signature)

    return decorate


@dataclass(frozen=True)
class RankSkip:
    """What a rank returns that called pytest.skip: the exception itself can't be pickled."""

    reason: str


def is_skip(error: BaseException) -> bool:
    """Whether pytest.skip raised it. The kit works without pytest, which therefore isn't imported."""
    pytest: Any = sys.modules.get("pytest")
    return pytest is not None and isinstance(error, pytest.skip.Exception)


@contextmanager
def warnings_filtered(filters: Sequence[WarningFilter]) -> Generator[None]:
    """Treat warnings as the test run does, where a warning may be an error. No filters: leave all as it is.

    Thread-ranks need none: they share the filters of the process.
    """
    if not filters:
        yield
        return
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for action, message, category, module, line in filters:
            warnings.filterwarnings(action, _pattern(message), category, _pattern(module), line, append=True)
        yield


def _pattern(regex: Any) -> str:
    return "" if regex is None else getattr(regex, "pattern", regex)
