"""Which c10d backend a run uses, and whether this machine has it."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from weft.errors import ConfigError


def default_local_backend() -> str:
    """The backend for ranks that share this host."""
    return "weft" if sys.platform == "linux" else "gloo"


def check_backend(backend: str, asker: str) -> None:
    """Raise ConfigError, in `asker`'s name, unless every backend that the string names can be used here.

    Understands what init_process_group does: "gloo", or "cpu:gloo,cuda:nccl".
    """
    known = sorted(set(dist.Backend.backend_list) - {"undefined"})
    for name in _names(backend):
        if name not in known:
            raise ConfigError(
                f"{asker}: backend={backend!r} names {name!r}, which c10d does not know. "
                f"It knows {', '.join(known)}; or pairs such as 'cpu:gloo,cuda:nccl'."
            )
    for name in _names(backend):
        if not dist.is_backend_available(name):
            raise ConfigError(
                f"{asker}: backend={backend!r} names {name!r}, which this build of torch does not have. "
                f"Use 'gloo', or leave the backend out."
            )


def _names(backend: str) -> list[str]:
    return [pair.rpartition(":")[2].strip().lower() for pair in backend.split(",")]


def is_same_backend(asked: str, config: str) -> bool:
    """Whether a backend string means what a group has, as dist.get_backend_config gives it."""
    to_config: Any = dist.BackendConfig  # it takes what Backend() makes, which is typed as a plain string
    return str(to_config(dist.Backend(asked))) == config
