"""A peer that knows the secret, and writes its messages by hand."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import weft
from tests.rpc.pickle_opcodes import built, call, made, mapped, named, parts, program, text
from tests.rpc.remote_functions import Counter, make_lazy
from weft import rpc
from weft.rpc import registry
from weft.rpc.calls import SyncCall
from weft.rpc.notices import write_notice
from weft.rpc.packing import Cargo, Packed
from weft.rpc.wire import Kind, encode_parts

SECS = 20.0


def ask(to: str, body: bytes, buffers: list[bytes] | None = None) -> Any:
    """Send the body of a call, whatever is in it; what it returns or raises."""
    agent = registry.current_agent()
    peer = agent.directory.find(to)
    request = SyncCall(peer.info, "a forged call", SECS)
    packed = Packed(body, [memoryview(buffer) for buffer in buffers or ()])
    return agent.caller._wait(request, lambda: agent.caller._post(peer, request, Kind.CALL, packed))


def notify(to: str, body: bytes) -> None:
    """Send the body of a notice, whatever is in it."""
    agent = registry.current_agent()
    agent.send(agent.directory.find(to), Kind.CONTROL, 0, body)


def pickled(body: bytes, index: Any = None) -> bytes:
    """The body of a message with a pickle, and an index in front of it."""
    table = b"" if index is None else pickle.dumps(index, 5)
    return len(table).to_bytes(4, "little") + bytes(12) + table + body


def direct(index: Any) -> bytes:
    """The body of a message that is an index alone."""
    return b"\xff" * 4 + bytes(12) + pickle.dumps(index, 5)


def say(to: str, what: str, flag: Path) -> str:
    """Try one way to have a worker do what it does not allow; what came of it."""
    try:
        return f"returned {_WAYS[what](to, flag)!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def ask_all(to: str, flag: Path) -> dict[str, str]:
    return {what: say(to, what, flag) for what in _WAYS}


def _change_agent(to: str, flag: Path) -> Any:
    """Set an attribute of the agent of an RRef that the message makes, then call what the value has."""
    rref = rpc.remote(to, Counter, (1,))
    agent = registry.current_agent()
    peer = agent.directory.find(to)
    cargo = Cargo(peer.info.id, is_answered=True)
    rref.fork_into(cargo)
    made = call(named("weft.rpc.rref", "rebuild_rref"), b"K\x00")
    changed = built(made, parts(pickle.NONE, mapped(agent=pickle.NONE)))
    body = program(
        named("weft.rpc.proxy", "call_method"),
        parts(changed, text("__init__"), parts(), mapped()) + mapped() + pickle.TUPLE3,
    )
    return ask(to, pickled(body, (None, cargo.forks, None)))


def _look_like_an_rref(to: str, flag: Path) -> Any:
    error = call(named("builtins", "ValueError"), text("x"))
    looks = built(error, mapped(agent=named("builtins", "bool"), local_value=named("builtins", "list")))
    body = program(
        named("weft.rpc.proxy", "call_method"),
        parts(looks, text("append"), parts(text("x")), mapped()) + mapped() + pickle.TUPLE3,
    )
    return ask(to, pickled(body))


def _tensor_in_a_file(to: str, flag: Path) -> Any:
    flag.write_bytes(b"secret" * 4000)
    place = (f"../..{flag}", "x", 1, 4096, flag.stat().st_ino, 0, 4096, 4096)
    descriptor = ("uint8", (4096,), None, False, None, place)
    what = ("tests.rpc.remote_functions", "give")
    try:
        return ask(to, direct((what, (None,), (0,), {}, (descriptor,), None)))
    finally:
        assert flag.read_bytes() == b"secret" * 4000
        flag.unlink()


def _tensor_in_own_memory(to: str, flag: Path) -> Any:
    bell = registry.current_agent().directory.find(to).card.bell
    descriptor = ("uint8", (64,), None, False, None, (*bell, 0, 4096, 64))
    return ask(to, direct((("tests.rpc.remote_functions", "give"), (None,), (0,), {}, (descriptor,), None)))


def _tensor_beyond_its_bytes(to: str, flag: Path) -> Any:
    descriptor = ("float32", (1 << 20,), (4,), False, None, None)
    index = (("tests.rpc.remote_functions", "give"), (None,), (0,), {}, (descriptor,), None)
    return ask(to, direct(index), [bytes(64)])


def _another_name(to: str, flag: Path) -> Any:
    return ask(to, direct((("os", "mkdir"), (str(flag),), (), {}, None, None)))


def _a_bomb_in_the_index(to: str, flag: Path) -> Any:
    return ask(to, b"\xff" * 4 + bytes(12) + program(call(named("os", "mkdir"), text(str(flag)))))


def _a_bomb_in_a_notice(to: str, flag: Path) -> Any:
    notify(to, program(call(named("os", "mkdir"), text(str(flag)))))
    for notice in [
        ("hello", b"{}", ("..", "..", 1, 1, 1)), ("hello", "x", None), ("drop", [((1, 2), 3)]),
        ("fetch", "a", 1),
        ("accept", 1), ("__class__",), (), ("context ended", "x"), ("backward failed", 1, 1, 1, [1]), 3,
    ]:  # fmt: skip
        notify(to, pickle.dumps(notice, 5))
    raise weft.RefusedError("nobody answers a notice")


def _an_rref_of_nobody(to: str, flag: Path) -> Any:
    index = (
        ("tests.rpc.remote_functions", "give"),
        (None,),
        (),
        {},
        None,
        None,
        ((0, (1, (1, 0), (7, 7), 7, False)),),
    )
    return ask(to, direct(index))


def _gradients_without_end(to: str, flag: Path) -> Any:
    what = ("weft.dist_autograd.messages", "take_gradients")
    return ask(to, direct((what, (1, 1, False, False, 1, 1, -2), (), {}, None, None)))


def _an_answer_that_imports(to: str, flag: Path) -> Any:
    """To pickle an object by name, Python imports the module that it names."""
    state = mapped(__reduce_ex__=named("builtins", "str"), __module__=text("this"))
    identity = built(made(named("torch.nn.modules.linear", "Identity")), state)
    body = program(named("tests.rpc.remote_functions", "give"), parts(identity) + mapped() + pickle.TUPLE3)
    return ask(to, pickled(body))


def _a_class_that_imports(to: str, flag: Path) -> Any:
    body = program(
        named("tests.rpc.remote_functions", "Meta"),
        parts(text("X"), parts(), mapped(__module__=text("this"))) + mapped() + pickle.TUPLE3,
    )
    return ask(to, pickled(body))


def _an_enum_that_imports(to: str, flag: Path) -> Any:
    body = program(
        named("tests.rpc.remote_functions", "Choices"),
        parts(text("X"), text("a b")) + mapped(module=text("this")) + pickle.TUPLE3,
    )
    return ask(to, pickled(body))


def _a_lazy_property(to: str, flag: Path) -> Any:
    """A method's name that is one of a descriptor which computes what it gives, on a class not listed."""
    rref = rpc.remote(to, make_lazy, (str(flag),))
    return rref.rpc_sync().mark()


def _cards_of_its_own_making(to: str, flag: Path) -> Any:
    """Another address, another process's memory, and the worker's own id: all in a group of known workers."""
    agent = registry.current_agent()
    own, its = agent.directory.find(agent.info.id).card, agent.directory.find(to).card
    forged = [
        replace(own, local_address=f"ipc:///proc/{own.pid}/fd/999"),
        replace(own, pid=its.pid, local_address=its.local_address, bell=its.bell),
        replace(own, remote_address="tcp://127.0.0.1:9"),
        replace(own, id=7, name="another"),
        replace(its, takes_memory=True),
        its,
    ]
    for card in forged:
        body = write_notice(("hello", card.encode(), None))
        parts = encode_parts(Kind.CONTROL, card.id, 0, agent.epoch, body, ())
        agent.links.send(its.id, parts)
    assert ask(to, direct((("tests.rpc.remote_functions", "add"), (1, 2), (), {}, None, None))) == 3
    raise weft.RefusedError("nobody answers a notice")


_WAYS = {
    "BUILD on the agent of an RRef": _change_agent,
    "an exception that looks like an RRef": _look_like_an_rref,
    "a tensor in a file": _tensor_in_a_file,
    "a tensor in the worker's own memory": _tensor_in_own_memory,
    "a tensor beyond its bytes": _tensor_beyond_its_bytes,
    "another name": _another_name,
    "a bomb in the index": _a_bomb_in_the_index,
    "a bomb in a notice": _a_bomb_in_a_notice,
    "an RRef of nobody": _an_rref_of_nobody,
    "gradients without end": _gradients_without_end,
    "an answer that imports": _an_answer_that_imports,
    "a class that imports": _a_class_that_imports,
    "an enum that imports": _an_enum_that_imports,
    "a lazy property": _a_lazy_property,
    "cards of its own making": _cards_of_its_own_making,
}
