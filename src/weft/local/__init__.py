"""The process group for ranks that share a host: c10d backend "weft"."""

from weft.local.backend import create_local_group
from weft.local.group import LocalGroup

__all__ = ["LocalGroup", "create_local_group"]
