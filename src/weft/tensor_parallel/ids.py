"""Indices of rows or classes that no rank has: nobody else would notice them.

Private names of torch, used here and nowhere else: `torch._assert_async`.
"""

from __future__ import annotations

import torch


def check_ids(ids: torch.Tensor, num_rows: int, words: str, ignored: int | None = None) -> None:
    """Raise IndexError for one that is out of range and isn't the ignored one; {} in `words` becomes it.

    On a GPU, and in a compiled graph, the device raises, later.
    """
    is_right = (ids >= 0) & (ids < num_rows)
    if ignored is not None:
        is_right |= ids == ignored
    if ids.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(is_right.all())  # type: ignore[attr-defined]
    elif not is_right.all():
        raise IndexError(words.format(int(ids[~is_right][0])))
