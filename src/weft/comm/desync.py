"""Notice that ranks disagree before any data moves.

With the check on, each rank writes what it is about to call, and from where, into
the group's store, and reads what the others are about to call. A difference raises
DesyncError on every rank, with each rank's call and line; a rank that doesn't come
raises PeerTimeoutError on the others. It costs a few store round trips a call, so
it is for finding a bug, not for every day. The local group compares calls even
with the check off; it then knows no lines of code. Values in the store are sealed
with the job's secret (weft.trust).

Not compared: send and recv, which concern two ranks only, and calls that bypass the
door.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from weft.comm.call import Call, Watcher, current_watchers, install_watcher, remove_watcher
from weft.comm.group import state_of, store_of
from weft.errors import DesyncError, PeerTimeoutError, TamperedError
from weft.trust import SealedStore, job_secret, world_name

ENVIRONMENT_VARIABLE = "WEFT_DESYNC_CHECK"
_PAIRWISE = ("send", "recv", "exchange")
# Their tensors differ by rank in a right program.
_SHAPES_MAY_DIFFER = ("all_to_all", "all_to_all_single", "gather", "scatter")


class DesyncCheck:
    """A watcher that compares every call with those of the other ranks."""

    def __init__(self, timeout_secs: float = 60.0, rank: int | None = None) -> None:
        self._timeout = timedelta(seconds=timeout_secs)
        self._rank = rank  # the only one to check, where ranks are threads; None: all

    def started(self, call: Call) -> None:
        """Tell the others, hear from them, compare."""
        state = state_of(call.group)
        is_mine = self._rank is None or state.global_rank == self._rank
        if not is_mine or call.op in _PAIRWISE or len(state.ranks) == 1:
            return
        prefix = f"weft/desync/{state.name}/{call.number}"
        store = store_of(call.group)
        group_words = f"{state.words()} in world '{world_name()}'"
        sealed = SealedStore(store, job_secret(), group=group_words, rank=state.rank)
        sealed.set(f"{prefix}/{state.rank}", json.dumps([_essentials(call), call.words(), call.site]))
        keys = [f"{prefix}/{rank}" for rank in range(len(state.ranks))]
        try:
            store.wait(keys, self._timeout)
        except (dist.DistStoreError, RuntimeError) as error:
            missing = [rank for rank, key in zip(state.ranks, keys, strict=True) if not store.check([key])]
            raise PeerTimeoutError(
                f"rank {state.global_rank} is at {call.words()} ({call.site}), call {call.number} of "
                f"{state.words()}; ranks {missing} did not come to any call within "
                f"{self._timeout.total_seconds():g} s.",
                missing,
            ) from error
        told = [_read_entry(sealed.get_json(key, rank), key) for rank, key in enumerate(keys)]
        if any(entry[0] != told[0][0] for entry in told):
            lines = "".join(
                f"\n  rank {rank}: {words} at {site}"
                for rank, (_, words, site) in zip(state.ranks, told, strict=True)
            )
            raise DesyncError(
                f"the ranks of {state.words()} call different things (call {call.number}):{lines}\n"
                "No data was moved. Make every rank take the same path to its collectives.",
                odd_ones(state.ranks, [entry[0] for entry in told]),
            )
        if call.number and state.rank == 0:
            # Everyone has come to this call, so everyone has read the one before.
            for rank in range(len(state.ranks)):
                store.delete_key(f"weft/desync/{state.name}/{call.number - 1}/{rank}")

    def finished(self, call: Call, error: BaseException | None, end_secs: float) -> None:
        """Nothing to do: the check comes before the data."""


def _essentials(call: Call) -> list[object]:
    """What must be equal on all ranks."""
    tensors = call.inputs or call.outputs
    shapes = [] if call.op in _SHAPES_MAY_DIFFER else [list(tensor.shape) for tensor in tensors]
    return [call.op, shapes, sorted({str(tensor.dtype) for tensor in tensors}), call.detail]


def _read_entry(entry: object, key: str) -> list[Any]:
    match entry:
        case [list(), str(), str()]:
            return cast("list[Any]", entry)
        case _:
            raise TamperedError(
                f"desync check: '{key}' in the group's store is not an entry that a rank writes."
            )


def odd_ones(ranks: Sequence[int], told: Sequence[object]) -> list[int]:
    """The ranks that say something else than most."""
    usual = max(told, key=told.count)
    return [rank for rank, entry in zip(ranks, told, strict=True) if entry != usual]


@contextmanager
def desync_check(timeout: float = 60.0) -> Generator[None]:
    """Compare every call of the block between ranks. Every rank must be in the block."""
    check = DesyncCheck(timeout, dist.get_rank() if dist.is_initialized() else None)
    install_watcher(check)
    try:
        yield
    finally:
        remove_watcher(check)


def install_desync_check() -> None:
    """Compare every call of this process from now on. Harmless when called again."""
    if not any(isinstance(watcher, DesyncCheck) for watcher in current_watchers()):
        install_watcher(DesyncCheck())


_is_environment_read = False


def watchers_in_force() -> tuple[Watcher, ...]:
    """Those who watch now; the first call turns the check on where WEFT_DESYNC_CHECK says so."""
    global _is_environment_read
    if not _is_environment_read:
        _is_environment_read = True
        if os.environ.get(ENVIRONMENT_VARIABLE, "0") not in ("", "0"):
            install_desync_check()
    return current_watchers()
