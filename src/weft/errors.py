"""Every error weft raises, in one tree.

    WeftError
    ├── ConfigError        an argument that can't work; nothing was changed     (ValueError)
    │   ├── ConfigTypeError    one of the wrong type                            (TypeError)
    │   ├── UnfitError         one that this module can't have, where torch says RuntimeError
    │   ├── RefusedError       one that is refused, where torch asserts         (AssertionError)
    │   └── UnsupportedError   one that could make sense, but is not there      (NotImplementedError)
    ├── StateError         a call at the wrong time: a closed group, say        (RuntimeError)
    ├── TamperedError      a value that its peer did not write, or of a wrong form (RuntimeError)
    ├── PeerError          another rank died, left or failed; names the ranks   (RuntimeError)
    │   ├── PeerTimeoutError   ranks that did not arrive in time                (TimeoutError)
    │   ├── DesyncError        ranks that called different things
    │   └── BackwardError      a worker's part of a distributed backward raised something
    ├── LaunchError        a launched function failed; holds every rank's traceback (RuntimeError)
    │   └── LaunchTimeoutError the launched run went past its timeout; holds every stack (TimeoutError)
    └── InternalError      a bug in weft                                        (AssertionError)

A message says who, what was seen, what is needed and what to do, and the rank
where ranks can differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class WeftError(Exception):
    """Base of every error that weft raises."""


class ConfigError(WeftError, ValueError):
    """An argument can't work. Nothing was changed by the call that raised it."""


class ConfigTypeError(ConfigError, TypeError):
    """An argument is of the wrong type."""


class UnfitError(ConfigError, RuntimeError):
    """An argument doesn't fit this module, or another argument. torch raises a RuntimeError for these."""


class RefusedError(ConfigError, AssertionError):
    """An argument is refused. torch raises an AssertionError for these."""


class UnsupportedError(ConfigError, NotImplementedError):
    """An argument asks for something that could make sense and is not there."""


class StateError(WeftError, RuntimeError):
    """A call came at a time when it can't be served."""


class TamperedError(WeftError, RuntimeError):
    """A value was not written by the peer that it names, or does not have the form that peers write.

    It was not used. Another program can write to the ranks' store, or the ranks have different secrets.
    """


class PeerError(WeftError, RuntimeError):
    """Another rank died, left its group or failed.

    `ranks` are the ranks to blame, as ranks of the whole world.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks: tuple[int, ...] = tuple(ranks)

    def __reduce__(self) -> tuple[type[PeerError], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


class PeerTimeoutError(PeerError, TimeoutError):
    """A collective waited past its timeout; `ranks` are those that had not arrived."""


class DesyncError(PeerError):
    """Ranks of one group called collectives that don't fit together."""


class BackwardError(PeerError):
    """A worker's part of a distributed backward failed; what it raised is the `__cause__`."""


class LaunchError(WeftError, RuntimeError):
    """A launched function did not return on every rank.

    `failures` maps each rank that failed to its report, traceback included.
    The exception of the rank that failed first is the `__cause__`.
    """

    def __init__(self, message: str, failures: Mapping[int, str]) -> None:
        super().__init__(message)
        self.failures: dict[int, str] = dict(failures)

    def __reduce__(self) -> tuple[type[LaunchError], tuple[str, dict[int, str]]]:
        return type(self), (str(self), self.failures)


class LaunchTimeoutError(LaunchError, TimeoutError):
    """A launched run went past its timeout; `failures` says where each unfinished rank was."""


class InternalError(WeftError, AssertionError):
    """Something weft promises itself does not hold: a bug in weft, please report it."""
