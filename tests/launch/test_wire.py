"""Frames are cut right however the bytes come, and functions travel by the right way."""

from __future__ import annotations

import importlib.util
import socket
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import ConfigError
from weft.launcher.payload import (
    decode_call,
    decode_exception,
    encode_call,
    encode_exception,
    encode_result,
    publish_main,
)
from weft.launcher.wire import Idle, Message, MessageReader, Returned, encode_message, receive_message

MESSAGES: list[Message] = [Returned(b""), Idle(), Returned(b"x" * 300)]


@given(st.lists(st.integers(min_value=1, max_value=64)))
def test_reader_cuts_messages_from_any_chunks(chunk_sizes: list[int]) -> None:
    stream = b"".join(encode_message(message) for message in MESSAGES)
    reader, seen, start = MessageReader(), [], 0
    for size in [*chunk_sizes, len(stream)]:
        seen += reader.feed(stream[start : start + size])
        start += size
    assert seen == MESSAGES


def test_receive_takes_one_message_and_leaves_the_next() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for message in MESSAGES:
            theirs.sendall(encode_message(message))
        assert [receive_message(ours) for _ in MESSAGES] == MESSAGES
        theirs.sendall(encode_message(Idle())[:-1])
        theirs.close()
        assert receive_message(ours) is None


def load_from_file(path: Path, name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_function_of_a_module_on_no_path_travels_by_value(tmp_path: Path) -> None:
    (tmp_path / "nowhere.py").write_text("LIMIT = 3\ndef f():\n    return LIMIT\n")
    module = load_from_file(tmp_path / "nowhere.py", "weft_test_nowhere")
    call = encode_call(module.f, (), {})
    del sys.modules["weft_test_nowhere"]
    fn, _, _ = decode_call(call)
    assert fn() == 3


def test_function_of_an_importable_module_travels_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weft_test_somewhere.py").write_text("def f():\n    return 4\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = load_from_file(tmp_path / "weft_test_somewhere.py", "weft_test_somewhere")
    try:
        assert decode_call(encode_call(module.f, (), {}))[0] is module.f
        by_value, _, _ = decode_call(encode_call(module.f, (), {}, by_value=True))
        assert by_value is not module.f
        assert by_value() == 4
    finally:
        del sys.modules["weft_test_somewhere"]


def test_a_namesake_elsewhere_on_the_path_is_not_taken_for_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weft_test_twin.py").write_text("def f():\n    return 'the wrong one'\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "weft_test_twin.py").write_text("def f():\n    return 'the right one'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = load_from_file(tmp_path / "sub" / "weft_test_twin.py", "weft_test_twin")
    call = encode_call(module.f, (), {})
    del sys.modules["weft_test_twin"]
    assert decode_call(call)[0]() == "the right one"


def test_what_cannot_be_pickled_is_a_config_error_that_names_the_function() -> None:
    with pytest.raises(ConfigError, match=r"receive_message.*can't be pickled.*kind='thread'"):
        encode_call(receive_message, (sys._getframe(),), {})


def test_result_that_cannot_be_pickled_names_its_rank_and_type() -> None:
    with pytest.raises(TypeError, match="rank 3 returned a frame that can't be pickled"):
        encode_result(sys._getframe(), rank=3)


class NeedsTwoArguments(Exception):
    """Pickles without complaint, and can't be loaded."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def test_exceptions_travel_or_become_text() -> None:
    pickled = encode_exception(KeyError("k"))
    assert repr(decode_exception(pickled, "unused")) == repr(KeyError("k"))
    assert encode_exception(NeedsTwoArguments("a", "b")) is None
    text = decode_exception(None, "NeedsTwoArguments: a")
    assert repr(text) == repr(RuntimeError("NeedsTwoArguments: a"))
    assert repr(decode_exception(b"not a pickle", "E: a")) == repr(RuntimeError("E: a"))


def test_publish_main_puts_classes_where_pickle_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec("class Published: pass\ndef f(): return Published", namespace)
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    publish_main(namespace["f"])
    assert main.Published is namespace["Published"]


def test_publish_main_puts_what_functions_use_where_compilers_look(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, object] = {"__name__": "__main__", "__file__": "script.py"}
    exec("import math\nWIDTH = 3\ndef f(): return math.pi * WIDTH", namespace)
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    publish_main(namespace["f"])
    assert (main.math, main.WIDTH) == (namespace["math"], 3)
    assert not hasattr(main, "__file__")


def test_publish_main_leaves_the_globals_of_other_modules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, object] = {"__name__": "somewhere"}
    exec("import math\ndef f(): return math.pi", namespace)
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    publish_main(namespace["f"])
    assert not hasattr(main, "math")
