"""Validation of the parts of messages beside pickles: indexes, tensor descriptors, notices, failures. Pure.

The input is plain data (data_unpickler.py). Anything but the exact form that weft's workers write is refused
before it is used: numbers are of type int itself, and within bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from weft.errors import RefusedError
from weft.rpc.data_unpickler import refusal

_WORD = 1 << 64
_MAX_DIMS = 64
_MAX_BYTES = 1 << 47  # the size of a process's address space
_MAX_SPARSE = 1 << 62  # elements of a sparse tensor, most of which take no memory
_ITEM_BYTES = {
    str(value).removeprefix("torch."): value.itemsize
    for value in vars(torch).values()
    # A quantized tensor has a scale and a zero point beside its bytes, and is not sent.
    if isinstance(value, torch.dtype) and not str(value).startswith("torch.q")
}
# The number of dense tensors that a sparse one is sent as.
_NUM_PARTS = {"sparse_coo": 2, "sparse_csr": 3, "sparse_csc": 3, "sparse_bsr": 3, "sparse_bsc": 3}


def need(is_right: object, what: str) -> None:
    """Raise RefusedError for a part of a message, `what`, that does not have its form."""
    if not is_right:
        raise RefusedError(
            f"a message of a peer was refused: {what} has not the form that weft's workers send. All "
            "workers must run the same version of weft, and no other program may have their secret."
        )


def is_word(value: object, bound: int = _WORD) -> bool:
    """Whether this is an int from 0 to below a bound."""
    return type(value) is int and 0 <= value < bound


def is_id(value: object) -> bool:
    """Whether this is an encoded GlobalId."""
    return is_tuple_of(value, is_word, is_word)


def is_tuple_of(value: object, *parts: Callable[[object], bool]) -> bool:
    """Whether this is a tuple with parts of these forms."""
    if type(value) is not tuple or len(cast("tuple[Any, ...]", value)) != len(parts):
        return False
    return all(check(part) for check, part in zip(parts, cast("tuple[Any, ...]", value), strict=True))


def is_type(*kinds: type) -> Callable[[Any], bool]:
    """A check for exactly one of these types, not a subclass."""
    return lambda value: type(value) in kinds


_is_text, _is_bool = is_type(str), is_type(bool)
_is_failure = is_type(tuple, list)


def is_named(value: object) -> bool:
    """Whether this is a dict of keyword arguments."""
    return type(value) is dict and all(type(name) is str for name in cast("dict[Any, Any]", value))


# Indexes of messages


def check_direct(index: object) -> tuple[Any, ...]:
    """Check an index that is a whole message: what, values, places, kwargs, descriptors, stub, forks.

    Returns these, each fork with its place, and whether the message has a list of forks.
    """
    need(type(index) is tuple and 6 <= len(cast("tuple[Any, ...]", index)) <= 7, "an index")
    parts: Any = index
    what, values, places, kwargs, descriptors, stub, *more = parts
    is_name = is_tuple_of(what, _is_text, _is_text)
    need(is_name or is_word(what, 2), "the function or kind of a message")
    need(type(values) is tuple and (what != 0 or len(values) == 1), "the values of a message")
    need(_are_places(places, len(values)), "the places of tensors")
    need(is_named(kwargs) and (is_name or not kwargs), "the arguments with names")
    num_tensors = 0 if descriptors is None else check_descriptors(descriptors)
    need(num_tensors == len(places), "the places of tensors")
    check_stub(stub, num_tensors)
    forks: Any = more[0] if more else ()
    need(is_type(tuple)(forks) and all(is_tuple_of(fork, is_word, is_type(tuple)) for fork in forks), "forks")
    need(_are_places(tuple([place for place, _ in forks]), len(values)), "the places of RRefs")
    return what, values, places, kwargs, descriptors, stub, forks, bool(more)


def _are_places(places: object, num_values: int) -> bool:
    if type(places) is not tuple:
        return False
    found = cast("tuple[Any, ...]", places)
    return all(is_word(place, num_values) for place in found) and len(set(found)) == len(found)


def check_index(index: object) -> tuple[Any, Any, Any]:
    """Check the index of a message that has a pickle behind it: descriptors, forks and stub."""
    need(type(index) is tuple and len(cast("tuple[Any, ...]", index)) == 3, "an index")
    descriptors, forks, stub = cast("tuple[Any, Any, Any]", index)
    num_tensors = 0 if descriptors is None else check_descriptors(descriptors)
    check_stub(stub, num_tensors)
    need(type(forks) is list, "forks")
    return descriptors, forks, stub


def check_stub(stub: object, num_tensors: int) -> None:
    """Check the stub of distributed autograd: a number, and places of some of the message's tensors."""
    if stub is not None:
        need(is_tuple_of(stub, is_word, is_type(tuple)), "a cut of the graph")
        places = cast("tuple[int, tuple[Any, ...]]", stub)[1]
        need(places and _are_places(places, num_tensors), "a cut of the graph")


def check_forks(forks: Sequence[object], sender_id: int) -> None:
    """Check forks of RRefs: owner, id of the value, id of the fork, sender, whether it goes to its owner."""
    for fork in forks:
        need(is_tuple_of(fork, is_word, is_id, is_id, is_word, _is_bool), "an RRef")
        need(cast("tuple[Any, ...]", fork)[3] == sender_id, "the sender of an RRef")


# Tensors


def check_descriptors(descriptors: object) -> int:
    """Check tensor descriptors; returns how many. Each tensor's bytes must be in the message itself."""
    need(type(descriptors) is tuple, "the table of tensors")
    for descriptor in cast("tuple[Any, ...]", descriptors):
        _check_descriptor(descriptor)
    return len(cast("tuple[Any, ...]", descriptors))


def _check_descriptor(descriptor: Any) -> None:
    need(type(descriptor) is tuple and len(descriptor) in (5, 6), "a tensor's description")
    if len(descriptor) == 6:
        _check_dense(*descriptor)
        return
    layout, shape, is_coalesced, requires_grad, parts = descriptor
    need(_is_text(layout) and layout in _NUM_PARTS, "a tensor's layout")
    _check_shape(shape, 1, _MAX_SPARSE)
    need(type(is_coalesced) is bool and type(requires_grad) is bool, "a sparse tensor's flags")
    need(
        is_tuple_of(parts, *[is_type(tuple)] * _NUM_PARTS[cast(str, layout)]), "the parts of a sparse tensor"
    )
    for part in cast("tuple[tuple[Any, ...], ...]", parts):
        need(len(part) == 6, "a part of a sparse tensor")
        _check_dense(*part)


def _check_dense(dtype: Any, shape: Any, strides: Any, requires_grad: Any, device: Any, place: Any) -> None:
    need(type(dtype) is str and dtype in _ITEM_BYTES, "a tensor's dtype")
    _check_shape(shape, _ITEM_BYTES[dtype])
    if strides is not None:
        need(is_tuple_of(strides, *[is_word] * len(shape)), "a tensor's strides")
        span = sum([(size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size])
        need(span * _ITEM_BYTES[dtype] < _MAX_BYTES, "a tensor's strides")
    need(type(requires_grad) is bool, "a tensor's requires_grad")
    need(device is None or (type(device) is str and _is_device(device)), "a tensor's device")
    if place is not None:
        raise refusal(
            "a tensor lies in memory outside of it. A worker with `allow` opens no memory of its peers"
        )


def check_buffers(descriptors: Any, lengths: Sequence[int]) -> None:
    """Refuse checked descriptors that need more or fewer bytes than the message has for them."""
    needed = [num_bytes for descriptor in descriptors for num_bytes in _needed_bytes(descriptor)]
    need(needed == list(lengths), "the bytes of its tensors")


def _needed_bytes(descriptor: Any) -> list[int]:
    if len(descriptor) == 5:
        return [num_bytes for part in descriptor[4] for num_bytes in _needed_bytes(part)]
    dtype, shape, strides, _, device, _ = descriptor
    if device == "meta":
        return []
    if strides is None or 0 in shape:
        return [math.prod(shape) * _ITEM_BYTES[dtype]]
    last = sum([(size - 1) * stride for size, stride in zip(shape, strides, strict=True)])
    return [(1 + last) * _ITEM_BYTES[dtype]]


def _check_shape(shape: Any, item_bytes: int, max_bytes: int = _MAX_BYTES) -> None:
    need(type(shape) is tuple and len(shape) <= _MAX_DIMS, "a tensor's shape")
    need(all(is_word(size, max_bytes) for size in shape), "a tensor's shape")
    # A size of 0 counts as 1: torch multiplies the other sizes to compute strides.
    num_elements = math.prod([size or 1 for size in cast("tuple[int, ...]", shape)])
    need(num_elements * item_bytes < max_bytes, "a tensor's shape")


def _is_device(name: str) -> bool:
    if name == "meta":
        return True
    kind, _, index = name.partition(":")
    is_number = index.isascii() and index.isdigit() and len(index) < 4
    return kind == "cuda" and is_number and int(index) < torch.cuda.device_count()


def check_bools(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors of bools with bytes other than 0 and 1: torch computes with the bytes."""
    for tensor in tensors:
        values = (
            tensor
            if tensor.layout is torch.strided
            else tensor.detach()._values()
            if (tensor.layout is torch.sparse_coo)
            else tensor.detach().values()
        )
        if values.dtype is torch.bool and not values.is_meta and values.numel():
            need(int(values.view(torch.uint8).max()) <= 1, "a tensor of bools")


# Failures and notices


def check_failure(failure: object) -> None:
    """Check a failure: a headline, a traceback, and a pickle of the exception or None."""
    need(_is_failure(failure) and len(cast("tuple[Any, ...]", failure)) == 3, "a failure")
    headline, text, body = cast("tuple[Any, ...]", failure)
    need(type(headline) is str and type(text) is str, "a failure")
    need(body is None or type(body) is bytes, "a failure")


def _is_gone(value: object) -> bool:
    return type(value) is list and all(is_tuple_of(pair, is_id, is_id) for pair in cast("list[Any]", value))


def _is_words(value: object) -> bool:
    try:
        check_failure(value)
    except RefusedError:
        return False
    return True


def _is_ring(value: object) -> bool:
    return value is None or is_tuple_of(value, *[is_word] * 5)


NOTICES: Mapping[str, tuple[Callable[[object], bool], ...]] = {
    "hello": (is_type(bytes), _is_ring),
    "ring": (),
    "to ring": (),
    "fetch": (is_id, is_word),
    "bye": (is_type(str, type(None)),),
    "lost": (),
    "drop": (_is_gone,),
    "fork": (is_id, is_id, is_word),
    "forked": (is_id, _is_bool),
    "accept": (is_id,),
    "context ended": (is_word,),
    "context reached": (is_word,),
    "backward failed": (is_word, is_word, is_word, _is_words),
}


def check_notice(notice: object) -> tuple[Any, ...]:
    """Check a decoded notice: its name, and arguments of the form that this name has."""
    need(type(notice) is tuple and notice, "a notice")
    name, *arguments = cast("tuple[Any, ...]", notice)
    need(type(name) is str and name in NOTICES, "a notice")
    need(is_tuple_of(tuple(arguments), *NOTICES[name]), f"the notice '{name}'")
    return cast("tuple[Any, ...]", notice)
