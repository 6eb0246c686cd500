"""The memory of one tensor, as bytes."""

from __future__ import annotations

import ctypes

import torch

from weft.errors import UnfitError


def span_of(tensor: torch.Tensor) -> int:
    """How many elements lie between its first and its last, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def shares_elements(tensor: torch.Tensor) -> bool:
    """Whether a tensor has more elements than memory, as an expanded one does.

    Kernels of torch's optimizers write to as many elements as a parameter has, from its first one on.
    """
    is_in_memory = tensor.layout is torch.strided and not tensor.is_meta
    return is_in_memory and tensor.nbytes > tensor.untyped_storage().nbytes()


def compacted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values without gaps between them."""
    tensor = tensor.detach()
    if tensor.itemsize > 1:
        return tensor.contiguous()
    return (
        tensor.view(torch.uint8).contiguous().view(tensor.dtype)
    )  # torch can't copy the dtypes of a few bits


def bytes_of(tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """The tensor's memory from its first element on, 1D and bytes, whatever its dtype."""
    _address_of(tensor, num_bytes)  # raises where there is too little: set_ would make it larger
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * tensor.itemsize
    return flat.set_(tensor.untyped_storage(), start, (num_bytes,), (1,))


def copy_bytes(tensor: torch.Tensor, num_bytes: int) -> memoryview:
    """A copy of so many bytes of the tensor's memory."""
    return memoryview(ctypes.string_at(_address_of(tensor, num_bytes), num_bytes))


def copy_memory(tensor: torch.Tensor, num_bytes: int, target: int) -> None:
    """Copy so many bytes of the tensor's memory to an address."""
    ctypes.memmove(target, _address_of(tensor, num_bytes), num_bytes)


def _address_of(tensor: torch.Tensor, num_bytes: int) -> int:
    """Where so many bytes of the tensor's memory begin. Raises where there are fewer."""
    if not num_bytes:
        return 0
    address = tensor.data_ptr()  # of one whose memory was freed it is its offset
    end = tensor.storage_offset() * tensor.itemsize + num_bytes
    if not address or end > tensor.untyped_storage().nbytes():
        raise UnfitError(
            f"weft.rpc: a tensor of shape {tuple(tensor.shape)} has no memory: it was freed, as that of a "
            "sharded parameter is. Send it while it has some."
        )
    return address
