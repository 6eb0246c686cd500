"""N ranks from Python, a notebook or the command line."""

from weft.launcher.api import launch
from weft.launcher.environment import World, init
from weft.launcher.pool import RankPool

__all__ = ["RankPool", "World", "init", "launch"]
