"""The CUDA driver's calls for memory that several processes of a host share.

torch's own sharing of CUDA tensors keeps reference counts in files of /dev/shm,
which a killed process leaves behind. These calls keep nothing: a handle is 64 bytes,
and the driver closes what an ended process had open.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch

from weft.errors import ConfigError, StateError, TamperedError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _IpcHandle(ctypes.Structure):
    _fields_ = (("raw", ctypes.c_ubyte * HANDLE_BYTES),)


class _DeviceArray:
    """Device memory in the form that torch takes over without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise StateError(f"the CUDA driver can't be loaded: {error}.") from error


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        words = (text.value or b"unknown error").decode()
        raise ConfigError(f"CUDA, {what}: {words} (error {code}).")


class DeviceBuffer(NamedTuple):
    """Device memory of this process that others can open."""

    address: int
    num_bytes: int
    handle: bytes
    device: torch.device

    def tensor(self, on_dropped: Callable[[], object] | None = None) -> torch.Tensor:
        """The memory as bytes. `on_dropped` is called when the last tensor on it is gone."""
        array = _DeviceArray(self.address, self.num_bytes)
        if on_dropped is not None:
            weakref.finalize(array, on_dropped).atexit = False
        with torch.inference_mode(False):  # it must be writable in that mode and outside of it
            return torch.as_tensor(array, device=self.device)


def new_buffer(num_bytes: int, device: torch.device) -> DeviceBuffer:
    """Allocate device memory. Raises ConfigError when there is not enough."""
    address = ctypes.c_uint64()
    handle = _IpcHandle()
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the device's context this thread's
        _check(
            _driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes)),
            f"{num_bytes:,} bytes on {device}",
        )
        code = _driver().cuIpcGetMemHandle(ctypes.byref(handle), address)
        if code:
            _driver().cuMemFree_v2(address)
            _check(code, "sharing memory between processes (is it a container without IPC?)")
    return DeviceBuffer(address.value or 0, num_bytes, bytes(handle.raw), device)


def free_buffers(buffers: Sequence[DeviceBuffer]) -> None:
    """Give device memory back to the driver."""
    for buffer in buffers:
        with torch.cuda.device(buffer.device):
            torch.cuda.synchronize()  # kernels that use it may still run
            _driver().cuMemFree_v2(ctypes.c_uint64(buffer.address))


def open_device_memory(handle: bytes, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Device memory of another process, as bytes. Closed with the last tensor that uses it.

    Raises TamperedError where it has fewer bytes than the peer published.
    """
    address = ctypes.c_uint64()
    raw = _IpcHandle.from_buffer_copy(handle)
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        _check(
            _driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), raw, ctypes.c_uint(_LAZY_PEER_ACCESS)),
            "opening another rank's memory (ranks on GPUs without peer access can't; use nccl)",
        )
        array = _DeviceArray(address.value, num_bytes)
        weakref.finalize(array, _close, address.value, device).atexit = False
        there = ctypes.c_size_t()
        code = _driver().cuMemGetAddressRange_v2(None, ctypes.byref(there), address)
        if num_bytes < 1 or (code == 0 and num_bytes > there.value):
            raise TamperedError(
                f"CUDA: another rank published {num_bytes} bytes of its memory, which has {there.value}. "
                "It was not used: a program of this user wrote into the group's shared memory."
            )
        return torch.as_tensor(array)


def _close(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        _driver().cuIpcCloseMemHandle(ctypes.c_uint64(address))
