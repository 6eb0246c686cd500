"""Who is to blame when a collective of another backend fails.

gloo and nccl say that a connection broke or that time ran out, not which rank is
missing. So a rank whose collective failed leaves a note in the group's store, and
looks for a moment at the notes of the others: those who failed in the same call
had arrived; those who left none had not. It costs nothing until something fails.

Notes are sealed with the job's secret (weft.trust). One that fails its check blames nobody; the error lists
it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from weft.comm.group import state_of, store_of
from weft.errors import PeerError, PeerTimeoutError, TamperedError, WeftError
from weft.trust import SealedStore, check_integer, job_secret, world_name

# Long enough for every rank of a broken group to notice: gloo closes its connections at once.
_GRACE_SECS = 1.0
_MAX_NUMBER = 1 << 62
_MAX_WORDS = 4096
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
    missing = notes.missing(state.ranks)
    elsewhere = {rank: note for rank, note in notes.by_rank.items() if note[0] != number}
    who = f"Not arrived: ranks {missing}." if missing else "Every rank failed."
    for rank, (other_number, other_words) in elsewhere.items():
        who += f" Rank {rank} was at call {other_number}, {other_words}."
    who += notes.describe_refused()
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
    refused = ""
    if late_ranks is not None:
        late = late_ranks()
    else:
        notes = _exchange_notes(group, f"waiting/{number}", number, words)
        late, refused = notes.missing(state.ranks), notes.describe_refused()
    return PeerTimeoutError(
        f"{words}, call {number} of {state.words()}, was not done within {timeout_secs:g} s on rank "
        f"{state.global_rank}. Not arrived: ranks {late}.{refused} It goes on: wait again for it, or look at "
        "what these ranks do.",
        late,
    )


@dataclass(frozen=True)
class _Notes:
    """The notes of the ranks on a topic: the number of each rank's call, and its description."""

    by_rank: dict[int, tuple[int, str]]
    refused: dict[int, str] = field(default_factory=dict[int, str])  # why a rank's note was refused

    def missing(self, ranks: tuple[int, ...]) -> list[int]:
        """The ranks without a note."""
        return [rank for rank in ranks if rank not in self.by_rank and rank not in self.refused]

    def describe_refused(self) -> str:
        """A sentence for each note that was refused."""
        return "".join(f" The note of rank {rank} was refused: {why}" for rank, why in self.refused.items())


def _exchange_notes(group: dist.ProcessGroup, topic: str, number: int, words: str) -> _Notes:
    """Leave this rank's note on a topic, and return every rank's, its own included."""
    state = state_of(group)
    notes = _Notes({state.global_rank: (number, words)})
    try:
        store = store_of(group)
        group_words = f"{state.words()} in world '{world_name()}'"
        sealed = SealedStore(store, job_secret(), group=group_words, rank=state.rank)
        sealed.set(f"weft/{topic}/{state.name}/{state.rank}", json.dumps([number, words[:_MAX_WORDS]]))
        deadline = time.monotonic() + _GRACE_SECS  # for all of them together
        for rank, global_rank in enumerate(state.ranks):
            if rank == state.rank:
                continue
            key = f"weft/{topic}/{state.name}/{rank}"
            try:
                store.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
                notes.by_rank[global_rank] = _read_note(sealed.get_json(key, rank), global_rank)
            except TamperedError as error:
                notes.refused[global_rank] = str(error)
            except (dist.DistStoreError, RuntimeError):
                continue
    except (dist.DistError, RuntimeError):
        pass  # the store is gone with its rank: we know of ourselves only
    return notes


def _read_note(note: object, rank: int) -> tuple[int, str]:
    match note:
        case [number, str(words)] if len(words) <= _MAX_WORDS:
            return check_integer(
                number, f"the number of a call in the note of rank {rank}", 0, _MAX_NUMBER
            ), words
        case _:
            raise TamperedError(
                f"the note of rank {rank} in the group's store is not a number and a text. It was not used."
            )
