"""Who is to blame when a collective of another backend fails.

gloo and nccl say that a connection broke or that time ran out, not which rank is
missing. So a rank whose collective failed leaves a note in the group's store, and
looks for a moment at the notes of the others: those who failed in the same call
had arrived; those who left none had not. It costs nothing until something fails.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta

import torch.distributed as dist

from weft.comm.group import state_of, store_of
from weft.errors import PeerError, PeerTimeoutError, WeftError

# Long enough for every rank of a broken group to notice: gloo closes its connections at once.
_GRACE_SECS = 1.0
_SIGNS_OF_TIMEOUT = ("timed out", "timeout", "Timed out", "Timeout")
_SIGNS_OF_DEATH = ("Connection closed", "Connection reset", "Broken pipe", "Socket closed", "closed by peer")


def explain(error: BaseException, group: dist.ProcessGroup, number: int, words: str) -> BaseException:
    """The error in weft's terms: a PeerError that names ranks, where others are to blame."""
    text = str(error)
    is_timeout = any(sign in text for sign in _SIGNS_OF_TIMEOUT)
    if isinstance(error, WeftError) or not (is_timeout or any(sign in text for sign in _SIGNS_OF_DEATH)):
        return error
    state = state_of(group)
    notes = _exchange_notes(group, "failed", number, words)
    missing = [rank for rank in state.ranks if rank not in notes]
    elsewhere = {rank: note for rank, note in notes.items() if note[0] != number}
    who = f"Not arrived: ranks {missing}." if missing else "Every rank failed."
    for rank, (other_number, other_words) in elsewhere.items():
        who += f" Rank {rank} was at call {other_number}, {other_words}."
    kind = PeerTimeoutError if is_timeout else PeerError
    happened = "waited past the timeout" if is_timeout else "lost a peer"
    return kind(
        f"rank {state.global_rank} {happened} in {words}, call {number} of {state.words()}. {who} Look "
        f"at what these ranks did last; the backend said: {text}",
        missing or list(elsewhere),
    )


def late_error(group: dist.ProcessGroup, number: int, words: str, timeout_secs: float) -> PeerTimeoutError:
    """The error of a wait that gives up for now, naming the ranks that have not arrived."""
    state = state_of(group)
    late_ranks = getattr(group, "late_ranks", None)  # the local group knows
    if late_ranks is not None:
        late = late_ranks()
    else:
        notes = _exchange_notes(group, f"waiting/{number}", number, words)
        late = [rank for rank in state.ranks if rank not in notes]
    return PeerTimeoutError(
        f"{words}, call {number} of {state.words()}, was not done within {timeout_secs:g} s on rank "
        f"{state.global_rank}. Not arrived: ranks {late}. It goes on: wait again for it, or look at what "
        "these ranks do.",
        late,
    )


def _exchange_notes(
    group: dist.ProcessGroup, topic: str, number: int, words: str
) -> dict[int, tuple[int, str]]:
    """Every rank's note on a topic, the own one included: the number of its call, and its words."""
    state = state_of(group)
    notes = {state.global_rank: (number, words)}
    try:
        store = store_of(group)
        store.set(f"weft/{topic}/{state.name}/{state.rank}", json.dumps([number, words]))
        deadline = time.monotonic() + _GRACE_SECS  # for all of them together
        for rank, global_rank in enumerate(state.ranks):
            key = f"weft/{topic}/{state.name}/{rank}"
            try:
                store.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
                seen_number, seen_words = json.loads(store.get(key))
                notes[global_rank] = (int(seen_number), str(seen_words))
            except (dist.DistStoreError, RuntimeError):
                continue
    except (dist.DistError, RuntimeError):
        pass  # the store is gone with its rank: we know of ourselves only
    return notes
