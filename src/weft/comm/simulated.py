"""torch's LocalTensorMode: one process that computes for all ranks of a group at once.

A collective alone is right there, since torch computes it for every rank. Whatever depends on which rank this
is (the shard it holds, the rows it keeps, who adds the bias) would be rank 0's for all of them, silently.
So everything but plain collectives of the user's is refused.

Private names of torch, used here and nowhere else: `torch._C._len_torch_dispatch_stack` and
`torch.distributed._local_tensor`'s `enabled_local_tensor_mode`.
"""

from __future__ import annotations

import sys

import torch

from weft.errors import UnsupportedError

_num_modes = torch._C._len_torch_dispatch_stack


def check_one_rank(what: str) -> None:
    """Raise where this process stands for several ranks. `what` asks to know which one it is."""
    if torch.compiler.is_compiling() or not _num_modes():
        return
    module = sys.modules.get("torch.distributed._local_tensor")
    if module is not None and module.enabled_local_tensor_mode() is not None:
        raise UnsupportedError(
            f"{what} doesn't work under torch's LocalTensorMode, where one process stands for several ranks: "
            "it would compute rank 0's part for each of them. Run ranks of their own instead, as threads of "
            'this process: weft.launch(function, ranks=4, kind="thread").'
        )
