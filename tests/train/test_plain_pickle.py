"""Pickles and torch.save's archives as data: what is honest is read, the rest refused, and nothing runs."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import struct
import tracemalloc
import zipfile
from typing import Any

import pytest
import torch

from weft.training.plain_pickle import Made, Name, PickleError, read_pickle
from weft.training.saved_values import SavedError, read_saved

HEAD = b"\x80\x04"


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_come_back(protocol: int) -> None:
    shared = [1, 2]
    value = {"a": shared, "b": (shared, None, True, -1, 2**40, -(2**40), 1.5, "ü"), 3: {"": ()}}
    assert read_pickle(pickle.dumps(value, protocol)) == value


def test_a_class_is_a_name_and_a_call_is_data() -> None:
    found = read_pickle(pickle.dumps(torch.Size([2, 3])))
    assert type(found) is Made
    assert (found.name, found.args) == ("torch.Size", ((2, 3),))
    assert type(read_pickle(pickle.dumps(os.system))) is Name


class Calls:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_is_called(protocol: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = read_pickle(pickle.dumps(Calls(), protocol))
    assert type(found) is Made
    assert not os.listdir()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        HEAD,
        HEAD + b".",
        HEAD + b"NN.",
        HEAD + b"(.",
        HEAD + b"N" + b"R.",
        HEAD + b"t.",
        HEAD + b"Nt.",
        HEAD + b"h\x00.",
        HEAD + b"]" + b"N" * 3,
        HEAD + b"Na.",
        HEAD + b"}]Ns.",  # a list as a key
        HEAD + b"}\x8a\x09" + b"\x7f" * 9 + b"Ns.",
        HEAD + b"(i" + b"os\nsystem\n.",
        HEAD + b"c" + b"x" * 1000,
        HEAD + b"cos\nsystem\n}b.",
        HEAD + b"P0\n.",
        HEAD + b"\x82\x01.",
        HEAD + b"X\xff\xff\xff\xff",
        HEAD + b"\x8c\x02\xff\xff.",
        HEAD + b"\x8a\xff" + bytes(255) + b".",
        HEAD + b"I" + b"9" * 5000 + b"\n.",
        HEAD + b"\x8e" + struct.pack("<Q", 2**60) + b".",
        HEAD + b"\x96" + struct.pack("<Q", 2**60) + b".",
        HEAD + b"(((a.",
    ],
)
def test_malformed_pickles_are_refused(content: bytes) -> None:
    with pytest.raises(PickleError):
        read_pickle(content)


def test_memory_is_bounded_by_the_bytes_and_not_by_declared_sizes() -> None:
    crafted = [
        HEAD + b"]r\xff\xff\xff\xff.",  # kept under number 4,294,967,295: a table of that size elsewhere
        HEAD + b"]\x94h\x00a.",  # a list in itself
        HEAD + b")" + b"\x85" * 10_000 + b".",
        HEAD + b"}" * 10_000,
    ]
    tracemalloc.start()
    for content in crafted:
        try:
            read_pickle(content)
        except PickleError:
            continue
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000


def test_every_opcode_that_torch_writes_is_known() -> None:
    """The state of an optimizer and a hook, with what their tensors may be of."""
    value = {
        "settings": [{"lr": 1e-3, "betas": (0.9, 0.999), "foreach": None, "a": False, "dtype": torch.int8}],
        "tensors": [
            torch.arange(6.0).view(2, 3).t(),
            torch.tensor(1.5, dtype=torch.bfloat16),
            torch.zeros(0, 4),
            torch.tensor([True, False]),
            torch.ones(3).to(torch.float8_e4m3fn),
            torch.arange(3).to(torch.uint16),
        ],
    }
    found = read_saved(saved(value))
    assert found["settings"] == value["settings"]
    for one, other in zip(found["tensors"], value["tensors"], strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.float(), other.float())


def changed(name: str, content: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A tensor of three numbers, with one part of its archive replaced."""
    whole = zipfile.ZipFile(io.BytesIO(saved(torch.ones(3))))
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", compression) as archive:
        for part in whole.namelist():
            archive.writestr(part, content if part == name else whole.read(part))
    return made.getvalue()


def pickled(numel: int = 3, size: int = 3, stride: int = 1, offset: int = 0) -> bytes:
    """The data.pkl of a tensor, which says of itself what it likes."""
    whole = zipfile.ZipFile(io.BytesIO(saved(torch.ones(3)))).read("archive/data.pkl")
    ops = [(op, arg, at) for op, arg, at in pickletools.genops(whole)]
    out = bytearray()
    numbers = [at for op, _, at in ops if op.name == "BININT1"]  # numel, offset, size, stride
    ends = [*[at for _, _, at in ops[1:]], len(whole)]

    def number(value: int) -> bytes:
        return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)

    wanted = dict(zip(numbers, map(number, (numel, offset, size, stride)), strict=True))
    for (_, _, at), end in zip(ops, ends, strict=True):
        out += wanted.get(at, whole[at:end])
    return bytes(out)


def test_the_base_of_the_crafted_archives_is_valid() -> None:
    assert torch.equal(read_saved(changed("archive/data.pkl", pickled())), torch.ones(3))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK",
        saved(torch.ones(3))[:-30],
        changed("archive/data/0", bytes(8)),  # shorter than its storage
        changed("archive/data/0", bytes(2**20), zipfile.ZIP_DEFLATED),  # grows a thousandfold
        changed("archive/byteorder", b"big"),
        changed("archive/data.pkl", b""),
        changed("archive/data.pkl", pickle.dumps(Calls(), 2)),
        changed("archive/data.pkl", pickled(numel=2**40)),  # torch.load would read what is behind it
        changed("archive/data.pkl", pickled(numel=-1)),
        changed("archive/data.pkl", pickled(size=4)),
        changed("archive/data.pkl", pickled(size=2**40)),
        changed("archive/data.pkl", pickled(size=-1)),
        changed("archive/data.pkl", pickled(stride=2)),
        changed("archive/data.pkl", pickled(offset=1)),
        changed("archive/data.pkl", pickled(offset=-1)),
        saved(torch.nn.Linear(1, 1)),
        saved({1.5: 1}),
        saved(torch.ones(3).to_sparse()),
        saved({"errors": {0: torch.zeros(1).expand(2**40)}}),  # a few bytes, until it is copied
    ],
)
def test_crafted_archives_are_refused(content: bytes) -> None:
    with pytest.raises(SavedError):
        read_saved(content)


def test_a_flipped_bit_in_a_tensor_is_seen() -> None:
    content = bytearray(saved(torch.ones(1000)))
    content[content.index(torch.ones(1000).numpy().tobytes()) + 500] ^= 1
    with pytest.raises(SavedError):
        read_saved(bytes(content))
