"""Indices of rows or classes that no rank has: nobody else would notice them.

Private names of torch, used here and nowhere else: `torch._assert_async`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def check_ids(
    ids: torch.Tensor, num_rows: int, words: Callable[[int], str], ignored: int | None = None
) -> None:
    """Raise IndexError, with words about it, for an index that is out of range and isn't the ignored one.

    On a GPU, and in a compiled graph, the device raises, later.
    """
    if ids.numel() == 0:
        return
    if ids.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = torch.aminmax(ids)  # one pass, and nearly always enough
        if low >= 0 and high < num_rows:
            return
    is_right = (ids >= 0) & (ids < num_rows)
    if ignored is not None:
        is_right |= ids == ignored
    if ids.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(is_right.all())  # type: ignore[attr-defined]
    elif not is_right.all():
        raise IndexError(words(int(ids[~is_right][0])))
