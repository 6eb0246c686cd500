"""A rank under Join and its group: what it says before each call, and what it hears.

Note [Words before calls]. While every rank is active nothing is said but STEP, once a step:
all ranks make all calls. A call of the user's might stand before the next step's notice, when
another rank has already left its loop, so it is preceded by the word EXTRA. From the first
step that not all ranks make, *every* call on the group is preceded by a word of every rank:
COVERED or EXTRA from active ranks, SHADOW from joined ranks inside a hook, IDLE from those
between steps. After EXTRA comes a description, and joined ranks make the described call;
after COVERED they make the hook's. All ranks read the same census, so that whatever does
not fit is found on all of them before data moves.

The calls are met where c10d makes them, in the methods of the process groups (patches.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft import comm
from weft.comm.call import call_site
from weft.comm.group import state_of
from weft.errors import DesyncError, StateError
from weft.join.callers import Callers, Origin
from weft.join.notice import Notice
from weft.join.patches import groups_with, innermost_watch, install_watch, remove_watch, unwatched
from weft.join.shadow import METHODS, OPS, describe_call, group_number, refusal, shadow_call, words
from weft.join.wire import (
    Census,
    Description,
    Flag,
    Say,
    decode_census,
    decode_description,
    encode_description,
)

_FLAGS = {
    Origin.IN_STEP: Flag.ZEROS,  # SyncBatchNorm leaves out ranks that count no rows
    Origin.SYNC_BATCH_NORM: Flag.ZEROS,
    Origin.SHADOWED: Flag.ZEROS,
    Origin.OBJECTS: Flag.OBJECTS,
    Origin.FOREIGN: Flag.FOREIGN,
}


class JoinWatch:
    """One rank's part in one Join."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, callers: Callers) -> None:
        self.group = group
        self.device = device
        self._callers = callers
        self._size = group.size()
        self._notice: Notice | None = None  # of the step under way, until it has been read
        self._num_active = self._size  # ranks that make the step under way
        self._has_step = False
        self._has_joined = False
        self._mutex = threading.RLock()  # a word and its call go together; gradient hooks may have a thread
        self._groups: dict[int, dist.ProcessGroup] = {}

    def install(self) -> None:
        """See the calls on the group, and on those that hold all of its ranks."""
        groups = groups_with(dist.get_process_group_ranks(self.group))
        self._groups = {group_number(group): group for group in groups}
        install_watch(self, groups, METHODS)

    def remove(self) -> None:
        """See no more calls. Harmless when not installed."""
        remove_watch(self)

    @property
    def is_in_force(self) -> bool:
        """Whether no other Join has been entered on the group since."""
        return innermost_watch(self.group) is self

    # -- an active rank ---------------------------------------------------------

    def begin_step(self) -> Notice:
        """Tell the others that this rank makes another step."""
        self._read_notice()  # of a step without a call
        self._notice = Notice(self._launch(Say.STEP), self.device)
        self._has_step = True
        return self._notice

    def check_step_begun(self, joinable: object) -> None:
        """Check that the first Joinable has begun a step: hooks run in its order, and so must the calls."""
        if not self._has_step:
            raise StateError(
                f"{type(joinable).__name__} communicates before the first joinable of its Join has begun a "
                "step. Pass the joinables to Join in the order in which the loop uses them."
            )

    def is_tail(self) -> bool:
        """Whether some rank has joined and does not make the step under way."""
        return self.num_active() < self._size

    def num_active(self) -> int:
        """How many ranks make the step under way."""
        self._read_notice()
        return self._num_active

    def _read_notice(self) -> None:
        notice = self._notice
        if notice is not None:
            with self._mutex:
                if self._notice is notice:  # no other thread has read it meanwhile
                    self._num_active = self._checked(notice.read()).num_active
                    self._notice = None  # last: who finds None here finds the answer

    def around_call(
        self, method: str, group: dist.ProcessGroup, args: Sequence[Any], call: Callable[[], Any]
    ) -> Any:
        """Make a call on a watched group, after the words that it needs."""
        with self._mutex:
            if self._has_joined:
                self._wait_for_covered()
                return call()
            origin, is_through_door = self._callers.find_caller()
            if origin is Origin.COVERED:
                if self.is_tail():
                    self._say(Say.COVERED)
            elif origin is not Origin.IN_STEP or not self._has_step or self.is_tail():
                self._read_notice()
                if self._say(Say.EXTRA).extra < self._size:
                    flags = _FLAGS.get(origin, 0) | (Flag.DOOR if is_through_door else 0)
                    description = describe_call(method, group, args, flags)
                    self._agree(description, f" at {call_site()}")
            return call()

    def before_nested(self) -> None:
        """Check that no rank has joined before another Join is entered on the same group."""
        self._read_notice()
        if self._say(Say.EXTRA).extra < self._size:
            self._agree(Description(OPS.index("Join"), flags=Flag.NESTED), f" at {call_site()}")

    # -- a joined rank ------------------------------------------------------------

    def join(self) -> None:
        """From now on the rank stands in for itself."""
        self._read_notice()
        self._has_joined = True

    def wait_for_step(self) -> Census:
        """Stand in for calls between steps until active ranks begin one, or all have joined."""
        while True:
            census = self._say(Say.IDLE)
            if not census.extra:
                return census
            self._stand_in()

    def _wait_for_covered(self) -> None:
        while self._say(Say.SHADOW).extra:
            self._stand_in()

    def _stand_in(self) -> None:
        description = self._agree(None)
        group = self._groups.get(description.group)
        if group is None:
            raise StateError(
                f"rank {state_of(self.group).global_rank} has joined and can't make {words(description)} "
                "for the active ranks: it does not know the group. Make groups before entering Join."
            )
        with unwatched():
            shadow_call(description, group, self.device)

    # -- words -------------------------------------------------------------------------

    def _launch(self, say: Say) -> comm.Handle[torch.Tensor]:
        word = torch.full((1,), int(say), dtype=torch.int64, device=self.device)
        with unwatched():
            return comm.all_reduce(word, group=self.group, feature="join")

    def _say(self, say: Say) -> Census:
        return self._checked(int(self._launch(say).wait().item()))

    def _checked(self, total: int) -> Census:
        census = decode_census(total, self._size)
        problem = census.disagreement()
        if problem is not None:
            state = state_of(self.group)
            raise DesyncError(
                f"Join: rank {state.global_rank} found that {problem} Of the {self._size} ranks of "
                f"{state.words()}, {census.words()}. No data was moved."
            )
        return census

    def _agree(self, description: Description | None, site: str = "") -> Description:
        """Hear from the active ranks what comes next. Raises on every rank where it can't be shadowed."""
        state = state_of(self.group)
        given = encode_description(description, state.rank, self._size)
        vector = torch.tensor(given, dtype=torch.int64, device=self.device)
        with unwatched():
            handle = comm.all_reduce(vector, dist.ReduceOp.MAX, self.group, feature="join")
        maxima = handle.wait().tolist()
        agreed, joined = decode_description(maxima)
        mine = "" if description is None else f" This rank is at {words(description)}{site}."
        if agreed is None:
            raise DesyncError(
                f"Join: the active ranks of {state.words()} are at different collectives.{mine} Make every "
                "rank take the same path to its collectives."
            )
        joined_ranks = [state.ranks[rank] for rank in joined]
        reason = refusal(agreed, joined_ranks)
        if reason is not None:
            raise StateError(
                f"Join: ranks {joined_ranks} have no inputs left and can't take part in {words(agreed)}, "
                f"which the others call in the loop. {reason}{mine}"
            )
        return agreed
