"""Ranks that are killed or stopped at a random moment of random collectives.

`scripts/kills --of local --kills 50` does it fifty times; WEFT_TEST_KILLS=50 does it here.
"""

from __future__ import annotations

import os

import pytest

from tests.local_bodies.chaos import KILLS_A_RUN, run_seed

pytestmark = pytest.mark.full

NUM_RUNS = -(-int(os.environ.get("WEFT_TEST_KILLS", "6")) // KILLS_A_RUN)


@pytest.mark.parametrize("seed", range(NUM_RUNS))
def test_random_kills(seed: int) -> None:
    run_seed(seed)
