"""A distributed optimizer over processes: one of them dies, one has no part in a backward."""

from __future__ import annotations

import torch

from tests.dist_autograd_bodies.remote_parts import Part, step_as_one_dies, step_part_of_it
from tests.rpc_bodies.crew import Crew
from tests.rpc_bodies.running import takes


def test_a_worker_that_took_no_part_stays_as_it_is() -> None:
    with Crew(3) as crew:
        crew.join()
        values = crew[0].do(step_part_of_it)
    is_same = [torch.equal(value, Part(rank).weight) for rank, value in enumerate(values)]
    assert is_same == [False, False, True]


def test_a_worker_that_dies_is_named_and_the_others_have_stepped() -> None:
    with Crew(3) as crew:
        crew.join()
        with takes(at_most_secs=15):
            told, ranks, stepped = crew[0].do(step_as_one_dies)
    assert "step failed on 1 of 3 workers" in told
    assert "worker 'worker2' (id 2): PeerError: worker 'worker2' (id 2) is gone" in told
    assert ranks == (2,)
    assert not torch.equal(stepped, Part(1).weight)
