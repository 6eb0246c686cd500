"""The process group for ranks that share a host: c10d backend "weft"."""

from weft.local.backend import BACKEND, create_local_group, register_backend
from weft.local.group import LocalGroup

__all__ = ["BACKEND", "LocalGroup", "create_local_group", "register_backend"]
