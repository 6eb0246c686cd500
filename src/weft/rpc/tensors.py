"""Tensors to descriptors and bytes for one peer, and back.

A descriptor says what a tensor is and where its bytes are:

    (dtype, shape, strides, requires_grad, device, place)      a dense tensor
    (layout, shape, is_coalesced, requires_grad, parts)        a sparse one; parts are descriptors

`strides` is None for a contiguous tensor, `device` None for the receiver's CPU. `place` is None for bytes
that travel in the message, in the order of their tensors, else a block that is lent, or handed back
(arena.py, device_arena.py).

What arrives is the receiver's alone, a leaf of autograd, with the strides it had. Its memory can't be
resized. A view that uses less than half of the memory it spans arrives contiguous: the rest is not sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from weft.errors import UnfitError, UnsupportedError
from weft.rpc.arena import Arena, Block, Borrower, Form, Place
from weft.rpc.device_arena import DeviceBorrower, DeviceSlabs
from weft.rpc.sparse import is_dense, put_together, take_apart
from weft.rpc.tensor_memory import bytes_of, compacted, copy_bytes, span_of
from weft.rpc.wire import INLINE_BYTES, WireError
from weft.tensors import contiguous_strides, has_gaps

# From about here on a block costs less than to copy the bytes along with the message.
SHARED_BYTES = 64 * 1024
_SPARED_BYTES = 8 * 1024  # gaps in a view of less than this are sent along

_ON_DEVICE = "device"  # in front of a block that is a GPU's
_HANDED_BACK = "back"  # in front of one that is the receiver's own
_CPU = torch.device("cpu")
_NAMES = {
    value: str(value).removeprefix("torch.")
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
# The dtypes that numpy has too: it makes a tensor of a message's bytes in one step.
_NUMPY_DTYPES = {
    name: np.dtype(name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}

Descriptor = tuple[Any, ...]


@dataclass(frozen=True)
class Route:
    """The way to one peer. `device_map`: our device -> its device, for what we send.

    `takes_memory`: the peer opens memory that others lend. A worker with `allow` does not.
    """

    peer_id: int
    peer_name: str
    is_same_host: bool
    device_map: Mapping[torch.device, torch.device]
    is_answer: bool = False  # of answers to the peer's calls
    takes_memory: bool = True

    @property
    def is_lent(self) -> bool:
        """Whether memory can be lent to this peer."""
        return self.is_same_host and self.takes_memory


class _Parcel:
    """The tensors of one message, while they are packed."""

    __slots__ = ("buffers", "devices", "is_given_up", "lent", "route")

    def __init__(self, route: Route, is_given_up: bool) -> None:
        self.route = route
        self.is_given_up = is_given_up
        self.buffers: list[memoryview] = []
        self.lent: list[tuple[Arena, Place]] = []
        self.devices: set[torch.device] = set()  # with copies under way

    def finish_copies(self) -> None:
        """Wait for the streams: what they still write, the peer could read too early."""
        for device in self.devices:
            torch.cuda.current_stream(device).synchronize()


class TensorPost:
    """Sends and receives the tensors of one agent. Thread-safe."""

    def __init__(self, owner_id: int, *, hides_gaps: bool = False) -> None:
        """`hides_gaps`: send no bytes that lie between a tensor's elements and belong to another one."""
        self._owner_id = owner_id
        self._hides_gaps = hides_gaps
        self._arena = Arena()
        self._device_arenas: dict[torch.device, Arena] = {}
        self._borrower = Borrower()
        self._device_borrower = DeviceBorrower(self._borrower)

    def pack(
        self, tensors: Sequence[torch.Tensor], route: Route, *, is_given_up: bool = False
    ) -> tuple[object, list[memoryview]]:
        """Descriptors and bytes for a peer. `is_given_up`: nobody else has them, and nobody uses them again.

        The bytes of a contiguous tensor may be the tensor's own: they must be sent, or copied, before the
        tensor changes. If the message is not sent, `withdraw` must be told.

        Raises RuntimeError for a device that the route's map doesn't have, UnsupportedError for tensors that
        don't travel. Nothing is lent then.
        """
        parcel = _Parcel(route, is_given_up)
        try:
            descriptors = tuple([self._pack(tensor, parcel) for tensor in tensors])
            if parcel.devices:
                parcel.finish_copies()
        except BaseException:
            parcel.finish_copies()
            for arena, place in parcel.lent:
                arena.take_back([place])
            raise
        return descriptors, parcel.buffers

    def _pack(self, tensor: torch.Tensor, parcel: _Parcel) -> Descriptor:
        if tensor.is_cpu and not parcel.route.device_map and is_dense(tensor) and tensor.is_contiguous():
            num_bytes = tensor.nbytes
            if 0 < num_bytes <= INLINE_BYTES and not tensor.is_conj() and not tensor.is_neg():
                # The usual one, in a few steps.
                parcel.buffers.append(copy_bytes(tensor, num_bytes))
                return _NAMES[tensor.dtype], tuple(tensor.shape), None, tensor.requires_grad, None, None
        if not is_dense(tensor):
            layout, shape, is_coalesced, parts = take_apart(tensor)
            packed = tuple([self._pack(part, parcel) for part in parts])
            return layout, shape, is_coalesced, tensor.requires_grad, packed
        requires_grad = tensor.requires_grad
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.detach().resolve_conj().resolve_neg()
        strides, numel = None, tensor.numel()
        if not tensor.is_contiguous():
            strides, span = tensor.stride(), span_of(tensor)
            is_wide = span > 2 * numel and span * tensor.itemsize > _SPARED_BYTES
            if is_wide or (self._hides_gaps and has_gaps(tensor.shape, strides)):
                tensor, strides = compacted(tensor), None
            else:
                numel = span
        device, place = None, None
        if tensor.is_cpu:
            if parcel.route.device_map:
                device = _name_of(parcel.route.device_map.get(_CPU, _CPU))
            place = self._place(tensor, numel * tensor.itemsize, parcel)
        elif tensor.is_meta:
            device = "meta"
        else:
            device = _name_of(_map_device(tensor.device, parcel.route))
            place = self._place_from_device(tensor, numel * tensor.itemsize, device, parcel)
        return _NAMES[tensor.dtype], tuple(tensor.shape), strides, requires_grad, device, place

    def _place(self, tensor: torch.Tensor, num_bytes: int, parcel: _Parcel) -> Descriptor | None:
        """Lend a block with the bytes, or add them to the message."""
        if num_bytes >= SHARED_BYTES and parcel.route.is_lent:
            if parcel.is_given_up:
                place = self._borrower.hand_back(tensor, num_bytes, parcel.route.peer_id)
                if place is not None:
                    return _HANDED_BACK, parcel.route.peer_id, *place
            place = self._arena.put(tensor, parcel.route.peer_id, num_bytes)
            if place is not None:
                parcel.lent.append((self._arena, place))
                return tuple(place)
        if num_bytes <= INLINE_BYTES:  # will be copied into the message anyway; this is the fastest way
            parcel.buffers.append(copy_bytes(tensor, num_bytes))
        else:
            raw: Any = bytes_of(tensor, num_bytes).numpy()
            parcel.buffers.append(memoryview(raw).toreadonly())
        return None

    def _place_from_device(
        self, tensor: torch.Tensor, num_bytes: int, target: str | None, parcel: _Parcel
    ) -> Descriptor | None:
        """The same for a GPU's tensor. Small ones and those for other hosts go through pinned memory."""
        if not num_bytes:
            return self._place(torch.empty(0, device="cpu"), 0, parcel)
        flat = bytes_of(tensor, num_bytes)
        if target is not None and num_bytes >= SHARED_BYTES and parcel.route.is_lent:
            arena = self._device_arenas.get(tensor.device)
            if arena is None:
                slabs = DeviceSlabs(tensor.device)
                arena = self._device_arenas.setdefault(tensor.device, Arena(slabs.new_slab))
            place = arena.put(flat, parcel.route.peer_id)
            if place is not None:
                parcel.lent.append((arena, place))
                parcel.devices.add(tensor.device)
                return _ON_DEVICE, *place
        host = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        host.copy_(flat, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        return self._place(host, num_bytes, parcel)

    def unpack(
        self,
        descriptors: Any,
        buffers: Sequence[bytes | memoryview],
        route: Route,
        *,
        are_leaves: bool = True,
    ) -> list[torch.Tensor]:
        """The tensors that a peer packed. Large writable buffers are taken over for good, others are copied.

        They need gradients where the peer's did, unless the graph goes on behind them: `are_leaves` is False.

        Raises PeerError when the peer is gone and its memory with it, WireError when descriptors and buffers
        don't fit together.
        """
        if torch.is_inference_mode_enabled():  # what a peer sent may be trained with, wherever it arrives
            with torch.inference_mode(False):
                return self.unpack(descriptors, buffers, route, are_leaves=are_leaves)
        left = iter(buffers)
        tensors = [self._unpack(descriptor, left, route) for descriptor in descriptors]
        if are_leaves:
            for tensor, descriptor in zip(tensors, descriptors, strict=True):
                if descriptor[3]:
                    tensor.requires_grad_()
        if next(left, None) is not None:
            raise WireError(f"worker {route.peer_id} sent {len(buffers)} buffers, more than its tensors have")
        return tensors

    def _unpack(
        self, descriptor: Descriptor, left: Iterator[bytes | memoryview], route: Route
    ) -> torch.Tensor:
        if len(descriptor) == 5:
            layout, shape, is_coalesced, _, packed = descriptor
            parts = [self._unpack(part, left, route) for part in packed]
            return put_together(layout, shape, is_coalesced, parts)
        name, shape, strides, _, device, place = descriptor
        is_here = place is None or place[0] != _ON_DEVICE
        if is_here and device is None and strides is None and name in _NUMPY_DTYPES:
            form = (shape, _NUMPY_DTYPES[name])
            if place is None:
                return _copied(next(left, None), *form)
            return torch.from_numpy(self._borrow(place, route, form))
        dtype = _DTYPES[name]
        if device == "meta":
            strides = contiguous_strides(shape) if strides is None else strides
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        else:
            tensor = self._receive(dtype, device, place, left, route)
            if strides is not None:
                tensor.as_strided_(shape, strides)  # in place: the result is nobody's view
            elif tensor.numel() == math.prod(shape):
                tensor.resize_(shape)
            else:
                raise WireError(f"{tensor.numel()} elements for a tensor of shape {shape}")
        return tensor

    def _receive(
        self,
        dtype: torch.dtype,
        device: str | None,
        place: tuple[Any, ...] | None,
        left: Iterator[bytes | memoryview],
        route: Route,
    ) -> torch.Tensor:
        """The memory of one tensor, 1D and on its device."""
        if place is None:
            flat = _take_over(next(left, None), dtype)
        elif place[0] == _ON_DEVICE:
            block = self._device_borrower.fetch(
                Place(*place[1:]), route.peer_id, torch.device(device or "cuda")
            )
            num_elements = block.numel() // dtype.itemsize
            empty = torch.empty(0, dtype=dtype, device=block.device)
            return empty.set_(block.untyped_storage(), 0, (num_elements,), (1,))
        else:
            flat = torch.frombuffer(self._borrow(place, route), dtype=dtype)
        return flat if device is None else flat.to(device)

    def _borrow(self, place: tuple[Any, ...], route: Route, form: Form | None = None) -> Block:
        """A block of the host's memory, lent by the peer or handed back by it."""
        if place[0] == _HANDED_BACK:
            return self._arena.reclaim(Place(*place[2:]), route.peer_id, form)
        return self._borrower.borrow(Place(*place), route.peer_id, form)

    def withdraw(self, descriptors: Any) -> None:
        """Take back what `pack` lent for a message that is not sent."""
        for descriptor in descriptors:
            if len(descriptor) == 5:
                self.withdraw(descriptor[4])
            elif (place := descriptor[5]) is None:
                continue
            elif place[0] == _ON_DEVICE:
                for arena in self._device_arenas.values():
                    arena.take_back([Place(*place[1:])])
            elif place[0] == _HANDED_BACK:
                self._borrower.withdraw(Place(*place[2:]), place[1])
            else:
                self._arena.take_back([Place(*place)])

    def release_peer(self, peer_id: int) -> None:
        """Count nothing as lent to a peer that died or left, and let go of what it lent."""
        for arena in self._arenas():
            arena.release_peer(peer_id)
        self._borrower.release_peer(peer_id)
        self._device_borrower.release_peer(peer_id)

    def trim(self) -> None:
        """Give idle memory back to the system."""
        for arena in self._arenas():
            arena.trim()

    def close(self) -> None:
        """Let go of all memory. Tensors that were received, here and by peers, live on."""
        for arena in self._arenas():
            arena.close()
        self._device_borrower.close()
        self._borrower.close()

    @property
    def num_blocks_in_use(self) -> int:
        """How many blocks of memory peers have of us."""
        return sum(arena.num_blocks_in_use for arena in self._arenas())

    @property
    def arena_bytes(self) -> int:
        """How much memory the blocks take, free ones included."""
        return sum(arena.num_bytes for arena in self._arenas())

    def _arenas(self) -> list[Arena]:
        return [self._arena, *self._device_arenas.values()]


def _copied(buffer: bytes | memoryview | None, shape: Sequence[int], dtype: np.dtype[Any]) -> torch.Tensor:
    """Bytes of a message as a contiguous tensor; large ones that may be written to are taken over."""
    if buffer is None:
        raise WireError("fewer buffers than tensors")
    if len(buffer) != math.prod(shape) * dtype.itemsize:
        raise WireError(f"{len(buffer)} bytes for a tensor of shape {shape} and {dtype}")
    is_taken_over = len(buffer) > INLINE_BYTES and not memoryview(buffer).readonly
    array = np.ndarray(shape, dtype, buffer if is_taken_over else bytearray(buffer))
    return torch.from_numpy(array if array.flags.aligned else array.copy())


def _take_over(buffer: bytes | memoryview | None, dtype: torch.dtype) -> torch.Tensor:
    """Bytes of a message as a tensor, 1D."""
    if buffer is None:
        raise WireError("fewer buffers than tensors")
    if not buffer:
        return torch.empty(0, dtype=dtype, device="cpu")
    if len(buffer) > INLINE_BYTES and not memoryview(buffer).readonly:
        flat = torch.frombuffer(buffer, dtype=dtype)
        if flat.data_ptr() % dtype.itemsize == 0:
            return flat
    return torch.frombuffer(bytearray(buffer), dtype=dtype)


def _name_of(device: torch.device) -> str | None:
    return None if device.type == "cpu" else str(device)


def _map_device(device: torch.device, route: Route) -> torch.device:
    target = route.device_map.get(device)
    if target is not None:
        return target
    if device.type != "cuda":
        raise UnsupportedError(
            f"weft.rpc: a tensor on {device} doesn't travel; CPU and CUDA tensors do. Move it to the CPU."
        )
    words = "Response" if route.is_answer else "Request"
    raise UnfitError(
        "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to CPU before "
        "sending them over RPC, or call `set_device_map` on `TensorPipeRpcBackendOptions` to explicitly "
        f"configure device mapping. {words} device mapping is not available for destination "
        f"{route.peer_name}, but found tensor on device: {device}"
    )
