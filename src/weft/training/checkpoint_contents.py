"""The table of contents of a checkpoint in torch's distributed format, checked before any of it is used.

`.metadata` is a pickle of torch's: here it is decoded as data (plain_pickle.py), and must be consistent with
itself and with the files beside it. The names of its classes are those of torch 2.11 to 2.15.

Invariant: every part of a tensor lies in a plain file of the folder, and the parts make up the whole tensor.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from weft.observe.plain_files import MEBIBYTE, read_plain
from weft.training.plain_pickle import Made, Name, read_pickle
from weft.training.saved_values import SavedError, dtype_of, numbers_of

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}")
_CLASSES = "torch.distributed.checkpoint.metadata."
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_LAYOUT = "torch.serialization._get_layout"
Offsets = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Where a part of a tensor lies."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint: its parts by where they begin in it, with their sizes."""

    size: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[Offsets, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Contents:
    """All that a checkpoint has."""

    tensors: Mapping[str, SavedTensor]
    pieces: Mapping[tuple[str, Offsets], Piece]

    def metadata(self) -> Metadata:
        """The same as torch's Metadata, for its planner."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=tensor.dtype),
                    torch.Size(tensor.size),
                    [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in tensor.parts],
                )
                for name, tensor in self.tensors.items()
            },
            storage_data={},
        )


def read_contents(folder: int) -> Contents:
    """Read the contents of an open directory. Raises OSError and ValueError where it is not a checkpoint."""
    sizes: dict[str, int] = {}
    for name in os.listdir(folder):
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISREG(found.st_mode):
            sizes[name] = found.st_size
    # Each part of a tensor takes a kilobyte beside its bytes, so a valid .metadata is never a third of the
    # others. Those may be sparse files of any size: whatever they say, no more than a gigabyte is read.
    num_others = sum(sizes.values()) - sizes.get(".metadata", 0)
    most = min(max(64 * MEBIBYTE, num_others // 3), 1024 * MEBIBYTE)
    return _Reading(read_plain(".metadata", most, folder=folder), sizes).contents()


class _Reading:
    """A `.metadata` being decoded. Lists in it may be shared many times over, so its parts are counted."""

    def __init__(self, content: bytes, file_sizes: Mapping[str, int]) -> None:
        self._found = read_pickle(content)
        self._file_sizes = file_sizes
        self._num_left = len(content)

    def contents(self) -> Contents:
        state = _state_of(self._found, f"{_CLASSES}Metadata")
        pieces = self._pieces(state.get("storage_data"))
        tensors: dict[str, SavedTensor] = {}
        for name, entry in _dict(state.get("state_dict_metadata")).items():
            if type(name) is not str:
                raise SavedError("it has a tensor whose name is not a text")
            if type(entry) is Made and entry.name == f"{_CLASSES}BytesStorageMetadata":
                continue  # written by another program: weft writes tensors only
            tensors[name] = self._tensor(name, _state_of(entry, f"{_CLASSES}TensorStorageMetadata"), pieces)
        return Contents(tensors, pieces)

    def _tensor(
        self, name: str, state: dict[Any, Any], pieces: Mapping[tuple[str, Offsets], Piece]
    ) -> SavedTensor:
        dtype = _dtype(state.get("properties"))
        size = _size(state.get("size"))
        chunks = state.get("chunks")
        if type(chunks) is not list:
            raise SavedError(f"'{name}' has no parts")
        parts: dict[Offsets, tuple[int, ...]] = {}
        for chunk in chunks:  # type: ignore[reportUnknownVariableType]
            self._count()
            of_chunk = _state_of(chunk, f"{_CLASSES}ChunkStorageMetadata")
            at, sizes = _size(of_chunk.get("offsets")), _size(of_chunk.get("sizes"))
            if len(at) != len(size) or len(sizes) != len(size):
                raise SavedError(f"'{name}' has a part of another shape")
            if any(a + b > c for a, b, c in zip(at, sizes, size, strict=True)):
                raise SavedError(f"'{name}' has a part that reaches beyond it")
            if 0 in sizes and at in parts:
                continue  # the empty shard of a rank
            piece = pieces.get((name, at))
            if 0 not in sizes and (piece is None or piece.length < math.prod(sizes) * dtype.itemsize):
                raise SavedError(f"'{name}' has a part that is in no file")
            parts[at] = sizes
        if sum(map(math.prod, parts.values())) != math.prod(size):
            raise SavedError(f"the parts of '{name}' do not make up the whole")
        return SavedTensor(size, dtype, tuple(parts.items()))

    def _pieces(self, found: Any) -> dict[tuple[str, Offsets], Piece]:
        pieces: dict[tuple[str, Offsets], Piece] = {}
        used = dict.fromkeys(self._file_sizes, 0)
        for key, value in _dict(found).items():
            self._count()
            index = _state_of(key, f"{_CLASSES}MetadataIndex")
            name, offset = index.get("fqn"), index.get("offset")
            state = _state_of(value, _STORAGE_INFO)
            file, at, length = (state.get(word) for word in ("relative_path", "offset", "length"))
            if type(name) is not str:
                raise SavedError("it has a tensor whose name is not a text")
            if type(file) is not str or _FILE_NAME.fullmatch(file) is None:
                raise SavedError("it names a file that is not beside it")
            if file not in self._file_sizes:
                raise SavedError(f"{file} is missing, or not a regular file")
            at, length = numbers_of((at, length))
            if at + length > self._file_sizes[file]:
                raise SavedError(f"{file} is too short")
            used[file] += length
            if used[file] > self._file_sizes[file]:
                raise SavedError(f"the parts of tensors in {file} overlap")
            if state.get("transform_descriptors"):
                raise SavedError("its tensors were written with transformations, which weft does not read")
            pieces[name, () if offset is None else _size(offset)] = Piece(file, at, length)
        return pieces

    def _count(self) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            raise SavedError("it has more parts than bytes")


def _state_of(value: Any, name: str) -> dict[Any, Any]:
    """The attributes of an object of the class `name`. Raises SavedError for any other value."""
    if type(value) is not Made or value.name != name or value.args != () or type(value.state) is not dict:
        raise SavedError(f"it has another value where a {name.rpartition('.')[2]} is needed")
    return value.state


def _dict(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise SavedError("it has no table of its tensors and their places")
    return value  # type: ignore[reportUnknownVariableType]


def _size(value: Any) -> tuple[int, ...]:
    if type(value) is not Made or value.name != "torch.Size" or len(value.args) != 1:
        raise SavedError("it has sizes that are not a torch.Size")
    return numbers_of(value.args[0])


def _dtype(properties: Any) -> torch.dtype:
    """The dtype in the properties (dtype, layout, ...), whose layout must be strided."""
    is_made = type(properties) is Made and properties.name == f"{_CLASSES}TensorProperties"
    state: Any = properties.state if is_made else None
    if type(state) is not tuple or len(state) != 5 or type(state[0]) is not Name:
        raise SavedError("it has a tensor without a dtype")
    layout = state[1]
    if type(layout) is not Made or layout.name != _LAYOUT or layout.args != ("torch.strided",):
        raise SavedError("it has a tensor that is not strided")
    return dtype_of(state[0])
