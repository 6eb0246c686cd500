"""weft: distributed training for PyTorch, in Python that people can read and change."""

from weft import comm
from weft.comm import Handle, desync_check, record
from weft.errors import (
    ConfigError,
    DesyncError,
    InternalError,
    LaunchError,
    LaunchTimeoutError,
    PeerError,
    PeerTimeoutError,
    StateError,
    WeftError,
)
from weft.launcher import World, init, launch
from weft.local import LocalGroup

__all__ = [
    "ConfigError",
    "DesyncError",
    "Handle",
    "InternalError",
    "LaunchError",
    "LaunchTimeoutError",
    "LocalGroup",
    "PeerError",
    "PeerTimeoutError",
    "StateError",
    "WeftError",
    "World",
    "comm",
    "desync_check",
    "init",
    "launch",
    "record",
]
