"""Where tests outside of tests/rpc still look for tests/rpc/acts.py."""

from tests.rpc.acts import *  # noqa: F403
