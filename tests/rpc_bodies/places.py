"""Where tests outside of tests/rpc still look for tests/rpc/remote_functions.py."""

from tests.rpc.remote_functions import *  # noqa: F403
from tests.rpc.remote_functions import _lock  # noqa: F401
