"""Groups that workers join late and leave at will; names, and what is wrong with some."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.rpc import acts, guests
from tests.rpc.acts import call, see
from tests.rpc.crew import Crew
from tests.rpc.remote_functions import add, is_freed, spot
from tests.rpc.workers import WEFT, wait_until
from weft import rpc

pytestmark = pytest.mark.processes


def check_all_reach_all(crew: Crew, names: dict[int, str]) -> None:
    for member in names:
        for other, name in names.items():
            seen = crew[member].do(call, name, spot, WEFT)
            assert (seen.worker, seen.pid) == (name, crew[other].pid)


def test_workers_come_and_go() -> None:
    with Crew(4) as crew:
        init_method = crew.meeting("tcp")
        names = {0: "hub", 1: "early"}
        for member, name in names.items():
            crew[member].do(acts.join, name, member, None, init_method)
        check_all_reach_all(crew, names)
        # One joins late, and is everybody's at once.
        crew[2].do(acts.join, "late", 2, None, init_method)
        names[2] = "late"
        check_all_reach_all(crew, names)
        # One leaves: nobody else has to, and calls to it say so.
        crew[1].do(acts.leave)
        del names[1]
        check_all_reach_all(crew, names)
        for member in names:
            for to in ["early", 1]:
                with pytest.raises(RuntimeError, match=r"early|1"):
                    crew[member].do(call, to, add, 1, 2)
        # Its name and id are free for another.
        crew[3].do(acts.join, "early", 1, None, init_method)
        names[3] = "early"
        check_all_reach_all(crew, names)
        for member in names:
            crew[member].do(acts.leave)
            assert crew[member].do(acts.python_threads) == []


def test_a_late_group_meets_in_a_file() -> None:
    with Crew(2) as crew:
        init_method = crew.meeting("file")
        for member in range(2):
            crew[member].do(acts.join, f"worker{member}", member, None, init_method)
        check_all_reach_all(crew, {0: "worker0", 1: "worker1"})
        for member in [1, 0]:
            crew[member].do(acts.leave)


def test_one_that_left_comes_back() -> None:
    with Crew(2) as crew:
        init_method = crew.meeting("tcp")
        crew[0].do(acts.join, "hub", 0, None, init_method)
        for _ in range(3):
            crew[1].do(acts.join, "guest", 1, None, init_method)
            check_all_reach_all(crew, {0: "hub", 1: "guest"})
            crew[1].do(acts.hold_remote, "thing", "hub", acts.make_tracked, "thing")
            crew[1].do(acts.leave)
            with pytest.raises(RuntimeError, match="guest"):
                crew[0].do(call, "guest", add, 1, 2)
            # What it held is free.
            wait_until(lambda: crew[0].do(call, "hub", is_freed, WEFT, "thing"), "freed")
        crew[0].do(acts.leave)


def test_one_that_left_is_named_to_those_who_wait_for_it() -> None:
    with Crew(3) as crew:
        init_method = crew.meeting("tcp")
        for member in range(3):
            crew[member].do(acts.join, f"worker{member}", member, None, init_method)
        crew[0].do(acts.hold_remote, "mine", "worker2", acts.Counter)
        crew[2].do(acts.leave, graceful=False)
        for what in ["held to_here", "held proxy"]:
            seen = crew[0].do(see, what, "mine")
            assert seen.is_peer_error, seen
            assert "worker2" in seen.text, seen
            assert seen.ranks == (2,), seen


def test_a_worker_that_dies_makes_room() -> None:
    with Crew(3) as crew:
        init_method = crew.meeting("tcp")
        for member in range(3):
            crew[member].do(acts.join, f"worker{member}", member, None, init_method)
        crew[1].kill()
        seen = crew[0].do(see, "sync", "worker1", "gate")
        assert seen.is_peer_error, seen
        assert seen.ranks == (1,), seen
        newcomer = crew.add()
        newcomer.do(acts.join, "worker1", 1, None, init_method)
        check_all_reach_all(crew, {0: "worker0", 2: "worker2", 3: "worker1"})
        for member in [3, 2, 0]:
            crew[member].do(acts.leave)


def test_many_join_at_the_same_time() -> None:
    with Crew(5) as crew:
        init_method = crew.meeting("tcp")
        joining = [crew[m].begin(acts.join, f"worker{m}", m, None, init_method) for m in range(5)]
        for future in joining:
            future.result(30)
        check_all_reach_all(crew, {m: f"worker{m}" for m in range(5)})
        for future in [crew[m].begin(acts.leave) for m in range(5)]:
            future.result(30)


def test_names_of_a_late_group_are_unique() -> None:
    with Crew(2) as crew:
        init_method = crew.meeting("tcp")
        crew[0].do(acts.join, "same", 0, None, init_method)
        with pytest.raises(RuntimeError, match="RPC worker name same is not unique"):
            crew[1].do(acts.join, "same", 1, None, init_method)
        assert crew[1].do(acts.python_threads) == []
        crew[1].do(acts.join, "other", 1, None, init_method)
        check_all_reach_all(crew, {0: "same", 1: "other"})
        for member in range(2):
            crew[member].do(acts.leave)


def test_names_of_a_world_are_unique() -> None:
    with Crew(2) as crew:
        init_method = crew.meeting()
        joining = [crew[m].begin(acts.join, "same", m, 2, init_method, rpc_timeout=5) for m in range(2)]
        for member, future in enumerate(joining):
            with pytest.raises(RuntimeError, match="same is not unique"):
                future.result(20)
            assert crew[member].do(acts.python_threads) == []


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a.b", "ä", "x" * 128, "a\n"], ids=repr)
def test_names_that_are_refused(name: str) -> None:
    with Crew(1) as crew:
        with pytest.raises(RuntimeError, match="Worker name must match"):
            crew[0].do(acts.join, name, 0, 1, crew.meeting())
        assert crew[0].do(acts.python_threads) == []


@pytest.mark.parametrize("name", ["a", "A-b_c:9", "x" * 127, "0"])
def test_names_that_are_fine(name: str) -> None:
    with Crew(1) as crew:
        crew[0].do(acts.join, name, 0, 1, crew.meeting())
        assert crew[0].do(call, name, spot, WEFT).worker == name
        crew[0].do(acts.leave)


def test_static_and_late_groups_dont_mix() -> None:
    with Crew(2) as crew:
        init_method = crew.meeting("tcp")
        crew[0].do(acts.join, "worker0", 0, None, init_method, rpc_timeout=3)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="mixes statically and dynamically"):
            crew[1].do(acts.join, "worker1", 1, 2, init_method, rpc_timeout=3)
        assert time.monotonic() - began < 8


def try_init(init_method: str, arguments: dict[str, Any]) -> tuple[list[str], str]:
    """The types of the error that init_rpc raises with these arguments, and its text."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method, rpc_timeout=2)
    try:
        rpc.init_rpc(
            **({"name": "worker0", "rank": 0, "world_size": 1, "rpc_backend_options": options} | arguments)
        )
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    rpc.shutdown(graceful=False)
    return [], "no error"


def test_what_init_refuses() -> None:
    with Crew(1) as crew:
        for kind, text, arguments in [
            ("TypeError", "Argument backend must be a member of BackendType", {"backend": "tensorpipe"}),
            ("TypeError", "must be an instance of RpcBackendOptions", {"rpc_backend_options": {"a": 1}}),
            ("RuntimeError", "must be of type", {"name": 3, "rank": 0, "world_size": 1}),
            ("ValueError", "rank", {"rank": -1, "world_size": 2}),
            ("ValueError", "rank", {"rank": 2, "world_size": 2}),
        ]:
            seen = crew[0].do(try_init, crew.meeting(), arguments)
            assert kind in seen[0], (arguments, seen)
            assert text in seen[1], (arguments, seen)
        assert crew[0].do(acts.python_threads) == []


def join_with_torchs_options(name: str, rank: int, init_method: str) -> float:
    from torch.distributed import rpc as torch_rpc

    options = torch_rpc.TensorPipeRpcBackendOptions(
        init_method=init_method, rpc_timeout=7.5, num_worker_threads=4
    )
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    return rpc.get_rpc_timeout()


def test_options_of_torch_are_taken() -> None:
    with Crew(2) as crew:
        init_method = crew.meeting()
        joining = [crew[m].begin(join_with_torchs_options, f"worker{m}", m, init_method) for m in range(2)]
        for future in joining:
            assert future.result(20) == 7.5
        assert crew[0].do(call, "worker1", add, 1, 2) == 3
        crew.every(acts.leave)


def test_the_secret_of_a_late_group_outlives_the_one_who_made_it(tmp_path: Path) -> None:
    with Crew(4) as crew:
        crew.every(guests.set_temporary_folder, str(tmp_path))
        init_method = crew.meeting("file")
        crew[0].do(acts.join, "worker0", 0, None, init_method)
        crew[1].do(acts.join, "worker1", 1, None, init_method)
        crew[0].kill()
        crew[2].do(acts.join, "worker2", 2, None, init_method)
        check_all_reach_all(crew, {1: "worker1", 2: "worker2"})
        # And when none is left, who comes begins anew; nothing is left of the others.
        crew[1].kill()
        crew[2].kill()
        crew[3].do(acts.join, "worker3", 3, None, init_method)
        assert crew[3].do(call, "worker3", add, 1, 2) == 3
        crew[3].do(acts.leave)
        assert not list(tmp_path.iterdir())
