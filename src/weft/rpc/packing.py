"""Objects to messages for one peer, and back.

The body of a message is a prefix, an index and a pickle. The index says what the pickle refers to outside
itself: which tensors, and which RRefs travel with it. It is read before anything is unpickled, so that a
message that fails half-way still gives back the RRefs it carried. What has the simple form of direct.py needs
no pickle: it is in the index, whole.
"""

from __future__ import annotations

import io
import pickle
import struct
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weft.errors import PeerError, StateError
from weft.rpc.direct import Lifted, lift_call, lift_value, put_back
from weft.rpc.failures import Failure, describe_failure, rebuild_failure
from weft.rpc.fence import Fence
from weft.rpc.fenced_unpickler import sealed
from weft.rpc.message_forms import check_bools
from weft.rpc.pickling import find_global, pickle_object, unpickle_object
from weft.rpc.tensor_memory import shares_elements
from weft.rpc.tensors import Route, TensorPost
from weft.rpc.tracking import Stub, Tracker
from weft.rpc.workers import WorkerInfo
from weft.tensors import find_tensors, map_tensors

# Bytes of the index, number of the pickle's own buffers, context of distributed autograd.
_PREFIX = struct.Struct("<IIQ")
_CONTEXT = struct.Struct("<8xQ")
_NO_INDEX = _PREFIX.pack(0, 0, 0)
_DIRECT = 0xFFFFFFFF  # in the place of the index's length: there is nothing else
PACKED_NONE = _NO_INDEX + pickle_object(None).body


@dataclass(slots=True)
class Packed:
    """What goes into a message, and the RRefs that go with it."""

    body: bytes
    buffers: list[memoryview]
    cargo: Cargo | None = None
    tensors: Any = None  # their descriptors
    context_id: int = 0
    stub: Stub | None = None  # what distributed autograd has noted of it


@dataclass(slots=True)
class Cargo:
    """The RRefs that travel with one message between two workers."""

    peer_id: int
    forks: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    is_answered: bool = False  # when the message has been unpacked, or can't be
    homeward: list[Any] = field(default_factory=list[Any])  # forks that go to their owner in such a message
    unconfirmed: list[Any] = field(default_factory=list[Any])  # RRefs that arrived, unknown to their owners


@sealed
class Reference:
    """What refers to a value of some worker's, and is counted while it travels. rref.py has the one class."""

    def fork_into(self, cargo: Cargo) -> int:
        """Make a fork of it that goes into a message; its place in the cargo."""
        raise NotImplementedError


class _Under(threading.local):
    """The cargo of the message that this thread is packing or unpacking."""

    cargo: Cargo | None = None


under_way = _Under()


def current_cargo(doing: str) -> Cargo:
    """The cargo of the message at hand. RRefs travel in messages only."""
    if under_way.cargo is None:
        raise StateError(
            f"Can not pickle rref in python pickler, rref can only be pickled when using RPC. ({doing} "
            "outside of an RPC: an RRef that is kept in a file or a queue can't be counted. Send it as an "
            "argument or a result.)"
        )
    return under_way.cargo


class Packer:
    """Packs and unpacks for one agent. `unclaimed` gets the cargo of a message not unpacked whole.

    `rebuild_rref(place)` returns the RRef at a place in the cargo of the current message. `allow`: the names
    that peers may use, None for all.
    """

    def __init__(
        self,
        post: TensorPost,
        allow: Sequence[str] | None,
        unclaimed: Callable[[Cargo], None],
        undo: Callable[[Cargo], None],
        rebuild_rref: Callable[[int], Any],
        tracker: Tracker | None = None,
    ) -> None:
        self._post = post
        self._tracker = tracker
        self.fence = None if allow is None else Fence(allow, rebuild_rref)
        self._unclaimed = unclaimed
        self._undo = undo
        self._rebuild_rref = rebuild_rref

    def check_call(self, function: object) -> None:
        """Raise RefusedError for a function that peers may not call."""
        if self.fence is not None:
            self.fence.check_call(function)

    def find_method(self, value: object, name: str) -> Callable[..., Any]:
        """Look up a method that a peer names. Raises RefusedError for one that it may not call."""
        return getattr(value, name) if self.fence is None else self.fence.allowed.find_method(value, name)

    def pack_call(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        route: Route,
        context_id: int = 0,
    ) -> Packed:
        """Pack a call for a peer, as part of a context of distributed autograd where one is given.

        What it registered of RRefs is undone if it can't be packed.
        """
        lifted = lift_call(func, args, kwargs, is_tracked=context_id != 0)
        if lifted is not None:
            return self._pack_lifted(lifted, route, context_id)
        rrefs = {place: value for place, value in enumerate(args) if isinstance(value, Reference)}
        if rrefs and len({id(rref) for rref in rrefs.values()}) == len(rrefs):  # one in two places stays one
            others = tuple([None if place in rrefs else value for place, value in enumerate(args)])
            lifted = lift_call(func, others, kwargs, is_tracked=context_id != 0)
            if lifted is not None:
                return self._pack_with_rrefs(lifted, rrefs, route, context_id)
        return self._pickle((func, args, kwargs), route, context_id)

    def pack(self, value: object, route: Route, context_id: int = 0, *, is_given_up: bool = False) -> Packed:
        """The same for the result of a call. `is_given_up`: nobody else has it, and nobody uses it again."""
        if value is None:  # a context has nothing to note of it
            return Packed(PACKED_NONE, [])
        lifted = lift_value(value, is_tracked=context_id != 0)
        if lifted is None:
            return self._pickle(value, route, context_id)
        return self._pack_lifted(lifted, route, context_id, is_given_up=is_given_up)

    def _pack_with_rrefs(
        self, lifted: Lifted, rrefs: Mapping[int, Reference], route: Route, context_id: int
    ) -> Packed:
        """Pack a call of a simple form, with RRefs in some places."""
        cargo = Cargo(route.peer_id, is_answered=not route.is_answer)
        try:
            for rref in rrefs.values():
                rref.fork_into(cargo)
            forks = tuple(zip(rrefs, cargo.forks, strict=True))
            packed = self._pack_lifted(lifted, route, context_id, forks=(forks,))
        except BaseException:
            self._undo(cargo)
            raise
        packed.cargo = cargo
        return packed

    def _pack_lifted(
        self,
        lifted: Lifted,
        route: Route,
        context_id: int,
        *,
        is_given_up: bool = False,
        forks: tuple[Any, ...] = (),
    ) -> Packed:
        plain, tensors = lifted
        is_unused = is_given_up and not context_id  # else its graph may have its memory
        descriptors, buffers = (
            self._post.pack(tensors, route, is_given_up=is_unused) if tensors else (None, [])
        )
        stub = None
        if context_id and self._tracker is not None:
            stub = self._tracker.on_send(context_id, tensors, route, is_given_up=is_given_up)
        body = _PREFIX.pack(_DIRECT, 0, context_id) + pickle.dumps((*plain, descriptors, stub, *forks), 5)
        return Packed(body, buffers, None, descriptors, context_id, stub)

    def _pickle(self, obj: object, route: Route, context_id: int) -> Packed:
        outer, cargo = under_way.cargo, Cargo(route.peer_id, is_answered=not route.is_answer)
        under_way.cargo = cargo
        try:
            pickled = pickle_object(
                _without_parameters(obj) if context_id else obj, is_fenced=self.fence is not None
            )
            if not pickled.tensors and not pickled.buffers and not cargo.forks and not context_id:
                return Packed(_NO_INDEX + pickled.body, [], cargo)
            descriptors, buffers = self._post.pack(pickled.tensors, route) if pickled.tensors else (None, [])
            stub = None
            if context_id and self._tracker is not None:
                stub = self._tracker.on_send(context_id, pickled.tensors, route)
            index = pickle.dumps((descriptors, cargo.forks, stub), 5)
            prefix = _PREFIX.pack(len(index), len(pickled.buffers), context_id)
            body = b"".join((prefix, index, pickled.body))
            return Packed(body, [*pickled.buffers, *buffers], cargo, descriptors, context_id, stub)
        except BaseException:
            self._undo(cargo)
            raise
        finally:
            under_way.cargo = outer

    def describe_failure(self, error: BaseException, worker: WorkerInfo) -> Failure:
        """An exception as data."""
        return describe_failure(error, worker, is_fenced=self.fence is not None)

    def rebuild_failure(self, failure: object) -> BaseException:
        """The exception that a peer's failure stands for; only what is allowed is built."""
        return rebuild_failure(failure, self.fence)

    def withdraw(self, packed: Packed) -> None:
        """Take back what a message lent and registered, since it is not sent."""
        if packed.cargo is not None:
            self._undo(packed.cargo)
        if packed.tensors is not None:
            self._post.withdraw(packed.tensors)
        if packed.stub is not None and self._tracker is not None:
            self._tracker.on_withdraw(packed.context_id, packed.stub)

    def note_sent(self, packed: Packed) -> None:
        """Do what could wait until a message was sent."""
        if packed.stub is not None and self._tracker is not None:
            self._tracker.on_sent(packed.context_id, packed.stub)

    def context_of(self, body: bytes | memoryview) -> int:
        """The context of distributed autograd that a message belongs to; 0 for none that is open here."""
        (context_id,) = _CONTEXT.unpack_from(body)
        is_open = context_id and self._tracker is not None and self._tracker.is_open(context_id)
        return context_id if is_open else 0

    def unpack_call(
        self,
        body: bytes | memoryview,
        buffers: Sequence[bytes | memoryview],
        route: Route,
        settle: Callable[[list[Any]], None],
    ) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
        """Unpack a call: its function and arguments. Raises as `unpack` does."""
        payload = self.unpack(body, buffers, route, settle)
        return payload if self.fence is None else self.fence.check_payload(payload)

    def unpack(
        self,
        body: bytes | memoryview,
        buffers: Sequence[bytes | memoryview],
        route: Route,
        settle: Callable[[list[Any]], None] | None = None,
    ) -> Any:
        """The object that a peer packed. `settle` gets the RRefs in it that their owners don't know yet.

        Raises what its classes raise, and RefusedError for what is not allowed.
        """
        if body == PACKED_NONE:
            return None
        num_index_bytes, num_own, context_id = _PREFIX.unpack_from(body)
        if num_index_bytes == _DIRECT:
            return self._put_back(memoryview(body)[_PREFIX.size :], buffers, route, context_id, settle)
        start = _PREFIX.size + num_index_bytes
        view = memoryview(body)
        unpickle = unpickle_object if self.fence is None else self.fence.unpickle
        if not num_index_bytes:
            return unpickle(view[start:], buffers, ())
        index = view[_PREFIX.size : start]
        descriptors, forks, stub = (
            load_plain(index) if self.fence is None else self.fence.read_index(index, route.peer_id)
        )
        with self._unpacking(list(forks), route, settle):
            tensors = self._unpack_tensors(descriptors, buffers[num_own:], route, context_id, stub)
            return unpickle(view[start:], buffers[:num_own], tensors)

    def _put_back(
        self,
        index: memoryview,
        buffers: Sequence[bytes | memoryview],
        route: Route,
        context_id: int,
        settle: Callable[[list[Any]], None] | None,
    ) -> Any:
        fence = self.fence
        what, values, places, kwargs, descriptors, stub, *more = (
            pickle.loads(index) if fence is None else fence.read_direct(index, route.peer_id)
        )
        find = find_global if fence is None else fence.find_function
        if not more:
            tensors = self._unpack_tensors(descriptors, buffers, route, context_id, stub)
            return put_back(what, values, places, kwargs, tensors, find)
        (forks,) = more
        with self._unpacking([fork for _, fork in forks], route, settle):
            tensors = self._unpack_tensors(descriptors, buffers, route, context_id, stub)
            filled = list(values)
            for fork_index, (place, _) in enumerate(forks):
                filled[place] = self._rebuild_rref(fork_index)
            return put_back(what, tuple(filled), places, kwargs, tensors, find)

    @contextmanager
    def _unpacking(
        self, forks: list[Any], route: Route, settle: Callable[[list[Any]], None] | None
    ) -> Generator[None]:
        """See to the RRefs of a message that is unpacked inside: what is not claimed is given back."""
        outer, cargo = under_way.cargo, Cargo(route.peer_id, forks)
        under_way.cargo = cargo
        try:
            yield
            if cargo.unconfirmed and settle is not None:
                settle(cargo.unconfirmed)
        finally:
            under_way.cargo = outer
            if cargo.forks:
                self._unclaimed(cargo)

    def _unpack_tensors(
        self, descriptors: Any, buffers: Sequence[Any], route: Route, context_id: int, stub: Stub | None
    ) -> Sequence[torch.Tensor]:
        tensors: Sequence[torch.Tensor] = ()
        if self.fence is not None:
            buffers = self.fence.own_buffers(descriptors, buffers)
        if descriptors is not None:
            try:
                tensors = self._post.unpack(descriptors, buffers, route, are_leaves=stub is None)
            except PeerError as error:
                raise PeerError(
                    f"worker '{route.peer_name}' (id {route.peer_id}) is gone, and with it the memory that "
                    "held the tensors it sent.",
                    [route.peer_id],
                ) from error
        if self.fence is not None:
            check_bools(tensors)
            tensors = [_written_out(tensor) for tensor in tensors]
        if context_id and self._tracker is not None:
            return self._tracker.on_receive(context_id, stub, tensors, route)
        return tensors


def _written_out(tensor: torch.Tensor) -> torch.Tensor:
    """The same, with memory for each element where it may be optimized."""
    if not tensor.requires_grad or not shares_elements(tensor):
        return tensor
    return tensor.detach().contiguous().requires_grad_()


def _without_parameters(obj: object) -> object:
    """The object with plain tensors for its parameters: these would arrive as leaves, and get no gradient.

    Those inside of modules and other objects stay: they are not what is computed with, but part of a copy.
    """
    if not any(isinstance(tensor, nn.Parameter) for tensor in find_tensors(obj)):
        return obj
    return map_tensors(
        lambda tensor: tensor.view_as(tensor) if isinstance(tensor, nn.Parameter) else tensor, obj
    )


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"plain data must not name {module_name}.{global_name}")


def load_plain(text: bytes | memoryview) -> Any:
    """Unpickle numbers, texts and containers of them, and nothing else."""
    return _PlainUnpickler(io.BytesIO(text)).load()
