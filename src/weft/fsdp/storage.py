"""Give the memory of a tensor back and take it again, while views of it, autograd's too, stay valid."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch


class _Here(threading.local):
    is_plan_for_gpu = False


_here = _Here()


def is_cheap(device: torch.device) -> bool:
    """Whether memory can be given back and had again for little. A CPU's new memory is dearer than a copy."""
    return device.type != "cpu" or _here.is_plan_for_gpu


@contextmanager
def memory_as_on_gpu() -> Generator[None]:
    """For plans, whose tensors of the CPU stand for a GPU's: all memory is cheap inside, on this thread."""
    outer, _here.is_plan_for_gpu = _here.is_plan_for_gpu, True
    try:
        yield
    finally:
        _here.is_plan_for_gpu = outer


def allocate_storage(tensor: torch.Tensor) -> None:
    """Give the tensor memory, if it has none. What is in it is anything."""
    storage = tensor.untyped_storage()
    num_bytes = int((tensor.storage_offset() + tensor.numel()) * tensor.element_size())
    if storage.size() < num_bytes:
        storage.resize_(num_bytes)


def free_storage(tensor: torch.Tensor) -> None:
    """Give the tensor's memory back. Whoever reads it before it is allocated again reads nothing."""
    storage = tensor.untyped_storage()
    if storage.size():
        if tensor.is_cuda:
            # It goes back to the stream under which it was allocated, which may be ahead of this one.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        storage.resize_(0)
