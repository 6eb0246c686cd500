"""Where tests outside of tests/rpc still look for tests/rpc/crew.py."""

from tests.rpc.crew import *  # noqa: F403
