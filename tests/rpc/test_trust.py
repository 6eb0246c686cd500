"""Who may have a worker run things: those who know the secret, and of these only what was allowed."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path

import pytest

import weft
from tests.rpc import acts, forgers, guests
from tests.rpc.acts import call
from tests.rpc.crew import Crew
from tests.rpc.remote_functions import Counter, DetailedError, add, fail_with, give, open_gate, pass_gate
from tests.rpc.strangers import Bomb, attack, find_doors, knock_and_stay
from tests.rpc.workers import WEFT, wait_until

pytestmark = pytest.mark.processes

WRONG_SECRET_SECS = 3.0


def test_the_bomb_goes_off_where_it_is_unpickled(tmp_path: Path) -> None:
    """Without this the tests below would show nothing."""
    pickle.loads(pickle.dumps(Bomb(tmp_path / "flag")))
    assert (tmp_path / "flag").exists()
    with Crew(2) as crew:
        crew.join()
        crew[0].do(guests.send_bomb, "worker1", give, tmp_path / "by a friend")
        assert (tmp_path / "by a friend").exists()


@pytest.mark.parametrize("listen", [None, "127.0.0.1"], ids=["default", "tcp"])
def test_a_stranger_gets_nothing_unpickled(listen: str | None, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    options = {} if listen is None else {"listen": listen, "secret": "open sesame, please"}
    with Crew(2) as crew:
        crew.join(**options)
        assert crew[0].do(call, "worker1", add, 1, 2) == 3
        waiting = crew[0].begin(call, "worker1", pass_gate, WEFT, "gate", 5)
        assert attack(crew[1].pid, flag) > 0
        assert not flag.exists()
        # And the worker has taken no harm: calls in flight, new ones, its end.
        crew[0].do(call, "worker1", open_gate, WEFT, "gate")
        assert waiting.result(20) == 5
        assert crew[1].do(call, "worker0", add, 1, 2) == 3
        crew.every(acts.leave)
        assert not flag.exists()


def test_strangers_who_stay_do_not_block_the_door() -> None:
    with Crew(2) as crew:
        crew.join()
        strangers = [sock for door in find_doors(crew[1].pid) for sock in knock_and_stay(door, 50)]
        assert strangers
        for i in range(20):
            assert crew[0].do(call, "worker1", add, i, 2) == i + 2
        crew.every(acts.leave)
        for sock in strangers:
            sock.close()


def test_doors_are_on_loopback_unless_told() -> None:
    with Crew(2) as crew:
        crew.join()
        hosts = {door.host for member in crew.members for door in find_doors(member.pid) if not door.is_unix}
        assert hosts <= {"127.0.0.1", "::1"}
        crew.every(acts.leave)


def test_no_door_stays_open() -> None:
    with Crew(2) as crew:
        crew.join()
        crew.every(acts.leave)
        assert [find_doors(member.pid) for member in crew.members] == [[], []]


@pytest.mark.parametrize("is_late", [False, True], ids=["world", "late"])
def test_a_wrong_secret_is_an_error_in_time(is_late: bool) -> None:
    with Crew(2) as crew:
        init_method = crew.meeting("tcp")
        size = None if is_late else 2
        began = time.monotonic()
        first = crew[0].begin(
            acts.join,
            "worker0",
            0,
            size,
            init_method,
            secret="the one that opens",
            rpc_timeout=WRONG_SECRET_SECS,
        )
        if is_late:
            first.result(20)
        with pytest.raises((RuntimeError, ValueError), match="secret"):
            crew[1].do(
                acts.join,
                "worker1",
                1,
                size,
                init_method,
                secret="another that does not",
                rpc_timeout=WRONG_SECRET_SECS,
            )
        if is_late:
            assert crew[0].do(call, "worker0", add, 1, 2) == 3
        else:
            with pytest.raises((RuntimeError, ValueError), match="secret"):
                first.result(20)
            assert crew[0].do(acts.python_threads) == []
        assert time.monotonic() - began < WRONG_SECRET_SECS + 4
        assert crew[1].do(acts.python_threads) == []
        with pytest.raises(RuntimeError, match="has not been initialized"):
            crew[1].do(call, "worker0", add, 1, 2)


def test_the_secret_of_the_environment() -> None:
    with Crew(2) as crew:
        crew.every(guests.set_variable, "WEFT_RPC_SECRET", "from the environment")
        crew.join(rpc_timeout=10)
        assert crew[0].do(call, "worker1", add, 1, 2) == 3
        crew.every(acts.leave)
        crew[1].do(guests.set_variable, "WEFT_RPC_SECRET", "from another environment")
        init_method = crew.meeting()
        joining = [
            crew[rank].begin(acts.join, f"worker{rank}", rank, 2, init_method, rpc_timeout=WRONG_SECRET_SECS)
            for rank in range(2)
        ]
        for future in joining:
            with pytest.raises((RuntimeError, ValueError), match="secret"):
                future.result(20)


def test_listening_elsewhere_needs_a_secret() -> None:
    with Crew(1) as crew:
        with pytest.raises(ValueError, match="secret"):
            crew[0].do(acts.join, "worker0", 0, 1, crew.meeting(), listen="0.0.0.0")
        crew[0].do(guests.set_variable, "WEFT_RPC_LISTEN", "0.0.0.0")
        with pytest.raises(ValueError, match="secret"):
            crew[0].do(acts.join, "worker0", 0, 1, crew.meeting())
        assert crew[0].do(acts.python_threads) == []


def test_another_user_of_this_host_is_a_stranger(tmp_path: Path) -> None:
    """Without a secret, what makes workers friends is a file that only their user can read."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    with Crew(2) as crew:
        init_method = crew.meeting("tcp")
        crew[0].do(acts.join, "worker0", 0, None, init_method)
        # Modules that are first needed when it joins may be in a folder that the other user can't read.
        crew[1].do(acts.join, "worker1", 0, None, crew.meeting("tcp"))
        crew[1].do(acts.leave)
        crew[1].do(guests.become_nobody)
        with pytest.raises((RuntimeError, ValueError, OSError), match=r"secret|[Pp]ermission"):
            crew[1].do(acts.join, "worker1", 1, None, init_method, rpc_timeout=WRONG_SECRET_SECS)
        assert crew[0].do(call, "worker0", add, 1, 2) == 3


def test_the_meeting_place_gives_no_secret_away() -> None:
    """Anybody may read the store: what is in it says at most which file only its owner can read."""
    with Crew(2) as crew:
        for options in [{}, {"secret": "open sesame, please"}]:
            init_method = crew.meeting("tcp")
            joining = [
                crew[rank].begin(acts.join, f"worker{rank}", rank, 2, init_method, **options)
                for rank in range(2)
            ]
            for future in joining:
                future.result(20)
            told = guests.read_store(init_method)
            assert not any(b"sesame" in value for value in told)
            # What is sealed may begin with any byte.
            files = [os.fsdecode(value) for value in told if value.startswith(b"/")]
            for file in files:
                if os.path.exists(file):
                    assert os.stat(file).st_mode & 0o077 == 0, file
                    assert not any(Path(file).read_bytes() in value for value in told)
            crew.every(acts.leave)
            assert not any(os.path.exists(file) for file in files)


def test_only_what_is_allowed() -> None:
    allow = ["torch.add", "tests.rpc.remote_functions.add", "tests.rpc.remote_functions.Counter"]
    with Crew(2) as crew:
        init_method = crew.meeting()
        joining = [
            crew[0].begin(acts.join, "worker0", 0, 2, init_method),
            crew[1].begin(acts.join, "worker1", 1, 2, init_method, allow=allow),
        ]
        for future in joining:
            future.result(20)
        assert crew[0].do(call, "worker1", add, 1, 2) == 3
        assert crew[0].do(guests.add_tensors, "worker1") == [2.0, 2.0]
        assert crew[0].do(call, "worker1", Counter.scale, 3, 4) == 12
        assert crew[0].do(guests.use_counter, "worker1") == 8
        refused = [
            (give, (1,)),
            (os.mkdir, ("/nowhere",)),
            (eval, ("1",)),
            (getattr, (1, "real")),
            (fail_with, (DetailedError, 1, "x")),
            (open_gate, (WEFT, "gate")),
        ]
        for function, args in refused:
            with pytest.raises(weft.RefusedError, match="allow") as caught:
                crew[0].do(call, "worker1", function, *args)
            assert function.__name__ in str(caught.value)
        for text in crew[0].do(guests.try_by_value, "worker1"):
            assert "allow" in text
        # The one who allows little may itself ask for anything, and its answers arrive.
        assert crew[1].do(call, "worker0", give, [1, 2]) == [1, 2]
        assert crew[0].do(call, "worker1", add, 1, 2) == 3
        crew.every(acts.leave)


def test_a_refused_argument_does_nothing(tmp_path: Path) -> None:
    """Not only the function: what an argument would build is refused too, before it is built."""
    with Crew(2) as crew:
        init_method = crew.meeting()
        joining = [
            crew[rank].begin(
                acts.join, f"worker{rank}", rank, 2, init_method, allow=["tests.rpc.remote_functions.add"]
            )
            for rank in range(2)
        ]
        for future in joining:
            future.result(20)
        with pytest.raises(weft.RefusedError, match="allow"):
            crew[0].do(guests.send_bomb, "worker1", add, tmp_path / "flag")
        assert not (tmp_path / "flag").exists()
        wait_until(lambda: crew[0].do(call, "worker1", add, 1, 2) == 3, "it works on")
        crew.every(acts.leave)


def test_a_peer_that_writes_its_messages_by_hand(tmp_path: Path) -> None:
    """It knows the secret and the documents. It is refused, and the worker works on."""
    names = ("add", "give", "Counter", "Meta", "Choices", "make_lazy")
    allow = ["torch.nn.Identity", *(f"tests.rpc.remote_functions.{name}" for name in names)]
    with Crew(2) as crew:
        init_method = crew.meeting()
        joining = [
            crew[0].begin(acts.join, "worker0", 0, 2, init_method),
            crew[1].begin(acts.join, "worker1", 1, 2, init_method, allow=allow),
        ]
        for future in joining:
            future.result(20)
        outcomes = crew[0].do(forgers.ask_all, "worker1", tmp_path / "flag")
        assert len(outcomes) >= 10
        for what, outcome in outcomes.items():
            assert outcome.startswith("RefusedError: "), (what, outcome)
        assert not (tmp_path / "flag").exists()
        assert not crew[1].do(guests.has_imported, "this")
        # It took no harm: its list is as it was, large tensors travel both ways, and it ends as it should.
        with pytest.raises(weft.RefusedError, match="getcwd"):
            crew[0].do(call, "worker1", os.getcwd)
        assert crew[0].do(guests.use_counter, "worker1") == 8
        assert crew[0].do(guests.give_large, "worker1", 1 << 20) == [0.0, float((1 << 20) - 1)]
        assert crew[1].do(call, "worker0", give, [1, 2]) == [1, 2]
        crew.every(acts.leave)
