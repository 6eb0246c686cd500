"""Check what the user passes to the launcher, before anything is started."""

from __future__ import annotations

from weft.errors import ConfigError


def check_function(fn: object, asker: str) -> None:
    """Check what is to run on the ranks."""
    if not callable(fn):
        raise ConfigError(
            f"{asker}: fn must be callable, to be called on every rank; got {type(fn).__qualname__} {fn!r}."
        )


def check_ranks(ranks: object, asker: str) -> None:
    """Check a number of ranks."""
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ConfigError(f"{asker}: ranks must be an integer of at least 1; got {ranks!r}.")


def check_kind(kind: object, asker: str) -> None:
    """Check what ranks are to be."""
    if kind not in ("process", "thread"):
        raise ConfigError(f"{asker}: kind must be 'process' or 'thread'; got {kind!r}.")


def check_timeouts(asker: str, **timeouts: float | None) -> None:
    """Check durations, by the names that the user knows them by; None means no limit."""
    for name, seconds in timeouts.items():
        if seconds is not None and (isinstance(seconds, bool) or not seconds > 0):
            raise ConfigError(f"{asker}: {name} is in seconds and must be greater than 0; got {seconds!r}.")
