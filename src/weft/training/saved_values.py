"""Read files of torch.save as plain data: texts, numbers, lists, dicts and tensors, and nothing else.

torch.load is not used, not even with weights_only: it trusts the sizes that a file declares. Here a tensor
must lie within its storage, a storage must have its declared length, and parts are checked by their CRC.
"""

from __future__ import annotations

import io
import math
import sys
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weft.training.plain_pickle import Made, Name, Persistent, PickleError, read_pickle

_MOST_DEPTH = 32
_DTYPES: Mapping[str, torch.dtype] = {
    f"torch.{name}": dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)
}
_STORAGES: Mapping[str, torch.dtype] = {
    f"torch.{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
        "ComplexFloat": torch.complex64,
        "ComplexDouble": torch.complex128,
    }.items()
} | {"torch.storage.UntypedStorage": torch.uint8}


class SavedError(ValueError):
    """The bytes were not written by torch.save, or are damaged, or hold more than data."""


def dtype_of(value: Any) -> torch.dtype:
    """Return the dtype of a Name. Raises SavedError where there is none of that name."""
    dtype = _DTYPES.get(value) if type(value) is Name else None
    if dtype is None:
        raise SavedError("it names a dtype that torch does not have")
    return dtype


def read_saved(content: bytes) -> Any:
    """Return the value that torch.save wrote. Raises SavedError for anything else."""
    try:
        return _Saved(content).value()
    except SavedError:
        raise
    except PickleError as error:
        raise SavedError(f"it holds {error}") from None
    except Exception as error:  # zipfile raises many types for a file that is not an archive
        raise SavedError(
            f"it was not written by torch.save, or is damaged ({type(error).__name__})"
        ) from None


class _Saved:
    """An archive of torch.save."""

    def __init__(self, content: bytes) -> None:
        self._archive = zipfile.ZipFile(io.BytesIO(content))
        entries = self._archive.infolist()
        self._names = {entry.filename for entry in entries}
        if len(self._names) != len(entries):
            raise SavedError("it has two parts with the same name")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise SavedError("its parts are compressed, which torch.save does not do")
        if sum(entry.file_size for entry in entries) > len(content):
            raise SavedError("its parts are longer than all of it")
        (pickled,) = [name for name in self._names if name.endswith("/data.pkl")]
        self._prefix = pickled.removesuffix("data.pkl")
        self._storages: dict[str, torch.Tensor] = {}
        self._num_left = len(content) + 100  # values to decode: they may be shared or contain themselves

    def value(self) -> Any:
        order = f"{self._prefix}byteorder"
        if order in self._names and self._archive.read(order).decode() != sys.byteorder:
            raise SavedError("it was written on a machine with another byte order")
        return self._decode(read_pickle(self._archive.read(f"{self._prefix}data.pkl")), 0)

    def _decode(self, value: Any, depth: int) -> Any:
        self._num_left -= 1
        if depth > _MOST_DEPTH or self._num_left < 0:
            raise SavedError("it is nested too deep, or its values are shared too often")
        kind: type[Any] = type(value)
        if kind in (str, int, float, bool, type(None)):
            return value
        if kind is dict:
            return {self._key(key): self._decode(one, depth + 1) for key, one in value.items()}
        if kind in (list, tuple):
            return kind(self._decode(one, depth + 1) for one in value)
        if kind is Name:
            return dtype_of(value)
        if kind is Made and value.state is None:
            return self._make(value)
        raise SavedError(f"it holds a {getattr(value, 'name', kind.__name__)}, which is not plain data")

    def _key(self, key: Any) -> Any:
        if type(key) not in (str, int):
            raise SavedError("it holds a dict with keys other than texts and integers")
        return key

    def _make(self, made: Made) -> Any:
        if made.name == "torch.Size" and len(made.args) == 1:
            return torch.Size(numbers_of(made.args[0]))
        if made.name == "torch._utils._rebuild_tensor_v2" and len(made.args) == 6:
            return self._tensor(made.args, None)
        if made.name == "torch._utils._rebuild_tensor_v3" and len(made.args) in (7, 8):
            return self._tensor(made.args, dtype_of(made.args[6]))
        raise SavedError(f"it holds a {made.name}, which is not plain data")

    def _tensor(self, args: tuple[Any, ...], dtype: torch.dtype | None) -> torch.Tensor:
        storage, offset, size, stride, *_ = args
        flat = self._storage(storage)
        if dtype is not None:
            flat = flat.view(torch.uint8).view(dtype)
        sizes, strides = numbers_of(size), numbers_of(stride)
        (first,) = numbers_of((offset,))
        last = first + sum((one - 1) * step for one, step in zip(sizes, strides, strict=True))
        if 0 not in sizes and last >= flat.numel():
            raise SavedError("it has a tensor that is longer than its storage")
        if math.prod(sizes) > flat.numel():  # by strides of 0, say: a copy of it would be of any size
            raise SavedError("it has a tensor with more elements than its storage")
        return flat.as_strided(sizes, strides, 0 if 0 in sizes else first)

    def _storage(self, value: Any) -> torch.Tensor:
        """All of a storage, as a tensor."""
        key: Any = value.key if type(value) is Persistent else None
        if type(key) is not tuple or len(key) != 5 or key[0] != "storage" or type(key[2]) is not str:
            raise SavedError("it has a tensor without a storage")
        dtype = _STORAGES.get(key[1]) if type(key[1]) is Name else None
        if dtype is None:
            raise SavedError("it has a storage of an unknown dtype")
        if key[2] not in self._storages:
            content = bytearray(self._archive.read(f"{self._prefix}data/{key[2]}"))
            flat = (
                torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
            )
            if dtype == torch.bool:  # bytes other than 0 and 1 become True
                flat = flat != 0
            self._storages[key[2]] = flat
        flat = self._storages[key[2]].view(dtype)
        if (flat.numel(),) != numbers_of((key[4],)):
            raise SavedError("it has a storage of another length than declared")
        return flat


def numbers_of(values: Any) -> tuple[int, ...]:
    """Check sizes, strides or offsets. Raises SavedError for anything else."""
    if type(values) is not tuple or len(values) > 64:
        raise SavedError("it has sizes that are not a tuple of at most 64 integers")
    found: Sequence[Any] = values
    if any(type(value) is not int or not 0 <= value < 2**48 for value in found):
        raise SavedError("it has sizes that are not integers from 0 to 2**48")
    if math.prod(value or 1 for value in found) >= 2**62:
        raise SavedError("it has sizes whose product is too large")
    return tuple(found)
