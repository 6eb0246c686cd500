"""Check what the user passes to the launcher, before anything is started."""

from __future__ import annotations

from weft.errors import ConfigError, ConfigTypeError

_MAX_SECS = 1e9  # thirty years; Python's and torch's waits overflow at some hundred years


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


def check_timeouts(asker: str, **timeouts: object) -> None:
    """Check durations, by the names that the user knows them by."""
    for name, seconds in timeouts.items():
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool):
            raise ConfigTypeError(
                f"{asker}: {name} is a number of seconds; got {type(seconds).__qualname__} {seconds!r:.100}."
            )
        if not 0 < seconds <= _MAX_SECS:  # which a NaN is not either
            raise ConfigError(
                f"{asker}: {name} is in seconds and must be greater than 0 and at most {_MAX_SECS:g}; "
                f"got {seconds!r}."
            )
