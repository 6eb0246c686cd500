"""Load tensors of a checkpoint: torch's planner maps shards, this reader validates the files."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from weft.observe.plain_files import open_plain
from weft.training.checkpoint_contents import Contents, Piece
from weft.training.saved_values import SavedError, read_saved


class PlainReader(StorageReader):
    """Reads the checkpoint in an open directory, whose contents have been checked."""

    def __init__(self, folder: int, contents: Contents) -> None:
        super().__init__()
        self._folder = folder
        self._contents = contents

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from load to load."""

    def read_metadata(self, *args: Any, **keywords: Any) -> Metadata:
        """Return the checked contents as torch's Metadata."""
        return self._contents.metadata()

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **keywords: Any
    ) -> None:
        """Nothing to do: the contents are known already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Every rank reads what it needs."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank reads what it needs."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """None is the one valid id: this reader is given an open directory."""
        return checkpoint_id is None

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's parts. Raises OSError and ValueError with a message for users."""
        with ExitStack() as files:
            opened: dict[str, int] = {}
            for item in plan.items:
                index = item.storage_index
                at = tuple(index.offset or ())
                piece = self._contents.pieces.get((index.fqn, at))
                if item.type != LoadItemType.TENSOR or piece is None:
                    raise SavedError(f"'{index.fqn}' has a part that is in no file")
                if piece.file not in opened:
                    file = files.enter_context(open_plain(piece.file, folder=self._folder))
                    opened[piece.file] = file.fileno()
                self._read(item, _content(opened[piece.file], piece), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, content: bytes, planner: LoadPlanner) -> None:
        name, at = item.storage_index.fqn, tuple(item.storage_index.offset or ())
        saved = self._contents.tensors[name]
        tensor = read_saved(content)
        size = dict(saved.parts)[at]
        if type(tensor) is not torch.Tensor or tensor.dtype != saved.dtype or tuple(tensor.shape) != size:
            raise SavedError(f"'{name}' has another shape or dtype than .metadata declares")
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        target = planner.resolve_tensor(item).detach()
        if target.shape != tensor.shape:
            raise SavedError(f"'{name}' is {list(tensor.shape)} where {list(target.shape)} is needed")
        target.copy_(tensor)
        planner.commit_tensor(item, target)


def _content(file: int, piece: Piece) -> bytes:
    """The bytes of a part."""
    content = bytearray()
    while len(content) < piece.length:
        more = os.pread(file, min(piece.length - len(content), 2**30), piece.offset + len(content))
        if not more:
            raise SavedError(f"{piece.file} is too short")
        content += more
    return bytes(content)
