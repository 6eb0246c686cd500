"""A rank under Join and its group: whose each collective is, and what ranks exchange before it.

Note [Status before calls]. While every rank is active only the status STEP is exchanged, once a step: all
ranks make all calls. A call of the user's might come before the next step's notice, when another rank has
already left its loop, so EXTRA is exchanged before it. From the first step that not all ranks make, ranks
exchange their status before *every* call on the group: COVERED or EXTRA for active ranks, SHADOW for joined
ranks inside a hook, IDLE for those between steps. After EXTRA comes a description, and joined ranks make
the described call; after COVERED they make the hook's. All ranks read the same census, so that whatever
does not fit is found on all of them before data moves.

Note [Whose a call is]. Context variables tell; nothing is guessed. weft.comm sets the feature that calls
through it, and strategies the feature for which they run a function of the user's (`comm.call`). Methods of
Joinables set theirs. While a Join is entered, torch's SyncBatchNorm and c10d's object collectives are
replaced by functions that set theirs.

c10d's groups are made in C++ and take no attributes of their own, so calls are intercepted in the methods
of their classes. Those, and torch's functions above, are replaced while at least one Join is entered and
not a moment longer; calls on other groups pass straight through. Ranks that are threads have groups of
their own.

The private name of torch that is used here: `_world.pg_map`, the groups that are there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules._functions import SyncBatchNorm

from weft import comm
from weft.comm.call import call_site, door_feature, host_feature
from weft.comm.door import USER
from weft.comm.group import state_of
from weft.errors import DesyncError, StateError
from weft.join.shadow import (
    METHODS,
    OPS,
    describe_call,
    format_call,
    group_number,
    refusal_reason,
    shadow_call,
)
from weft.join.wire import (
    CallDescription,
    Census,
    Flag,
    Status,
    decode_census,
    decode_description,
    encode_description,
)

OBJECT_CALLS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")


class Origin(Enum):
    """Whose a collective is; the value is what its description is flagged with."""

    COVERED = None  # a Joinable's: its hook makes the call on joined ranks
    IN_STEP = "in step"  # a SyncBatchNorm's inside a Joinable, or in a backward
    SYNC_BATCH_NORM = "norm"  # another SyncBatchNorm's
    SHADOWED = "shadowed"  # made in a block of shadowed()
    OBJECTS = "objects"  # part of a collective of pickled objects
    FOREIGN = "foreign"  # that of a part of weft that no Joinable of this Join covers
    USER = "user"


_FLAGS = {
    Origin.IN_STEP: Flag.ZEROS,  # SyncBatchNorm leaves out ranks that count no rows
    Origin.SYNC_BATCH_NORM: Flag.ZEROS,
    Origin.SHADOWED: Flag.ZEROS,
    Origin.OBJECTS: Flag.OBJECTS,
    Origin.FOREIGN: Flag.FOREIGN,
}

_joinables_of: ContextVar[tuple[JoinWatch, ...]] = ContextVar("weft_join_joinables_of", default=())
_torch_call: ContextVar[str] = ContextVar("weft_join_torch_call", default="")
_is_shadowed: ContextVar[bool] = ContextVar("weft_join_is_shadowed", default=False)


@contextmanager
def shadowed() -> Generator[None]:
    """Let joined ranks answer the collectives of this block with zeros, gathers too.

    Reductions outside of it get neutral values anyway. Does nothing outside of a Join.
    """
    token = _is_shadowed.set(True)
    try:
        yield
    finally:
        _is_shadowed.reset(token)


class JoinWatch:
    """One rank's part in one Join. `features` are those that its Joinables cover; None: all."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, features: frozenset[str] | None
    ) -> None:
        self.group = group
        self.device = device
        self.forwards: set[int] = set()  # ids of Joinables of weft's whose forward runs
        self._features = features
        self._size = group.size()
        self._step_handle: StepHandle | None = None  # of the step under way, until it has been read
        self._num_active = self._size  # ranks that make the step under way
        self._has_step = False
        self._has_joined = False
        self._mutex = threading.RLock()  # around a status and its call; gradient hooks may have a thread
        self._groups: dict[int, dist.ProcessGroup] = {}

    def install(self) -> None:
        """Watch the calls on the group, and on those that hold all of its ranks."""
        ranks = set(dist.get_process_group_ranks(self.group))
        for group in list(c10d._world.pg_map):
            if group.size() > 1 and ranks.issubset(dist.get_process_group_ranks(group)):
                self._groups[group_number(group)] = group
        _install_watch(self, list(self._groups.values()))

    def remove(self) -> None:
        """Watch no more. Harmless when not installed."""
        _remove_watch(self)

    # Whose a call is

    @contextmanager
    def joinable_running(self) -> Generator[None]:
        """A Joinable's method runs inside: what it calls is the Joinable's."""
        token = _joinables_of.set((*_joinables_of.get(), self))
        try:
            yield
        finally:
            _joinables_of.reset(token)

    def _find_origin(self) -> Origin:
        feature, torch_call = door_feature.get(), _torch_call.get()
        is_joinables = self in _joinables_of.get()
        if feature is None or feature == USER:
            if torch_call == "backward":  # of what a forward of this step computed
                return Origin.IN_STEP
            if torch_call == "forward":
                return Origin.IN_STEP if is_joinables or self.forwards else Origin.SYNC_BATCH_NORM
            feature = host_feature.get()
        if feature is not None:
            is_covered = self._features is None or feature in self._features
            return Origin.COVERED if is_covered else Origin.FOREIGN
        if is_joinables:
            return Origin.COVERED
        if torch_call:
            return Origin.OBJECTS
        return Origin.SHADOWED if _is_shadowed.get() else Origin.USER

    # An active rank

    def begin_step(self) -> StepHandle:
        """Announce that this rank makes another step."""
        self.forwards.clear()  # of one that failed
        self._read_step()  # of a step without a call
        self._step_handle = StepHandle(self._launch(Status.STEP), self.device)
        self._has_step = True
        return self._step_handle

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
        self._read_step()
        return self._num_active

    def _read_step(self) -> None:
        handle = self._step_handle
        if handle is not None:
            with self._mutex:
                if self._step_handle is handle:  # no other thread has read it meanwhile
                    self._num_active = self._decode(handle.read()).num_active
                    self._step_handle = None  # last: who finds None here finds the answer

    def around_call(
        self, method: str, group: dist.ProcessGroup, args: Sequence[Any], call: Callable[[], Any]
    ) -> Any:
        """Make a call on a watched group, after the exchange that it needs, which isn't watched itself."""
        with self._mutex:
            if self._has_joined:
                while self._exchange(Status.SHADOW).extra:
                    self._shadow_extra()
                return call()
            origin = self._find_origin()
            if origin is Origin.COVERED:
                if self.is_tail():
                    self._exchange(Status.COVERED)
            elif origin is not Origin.IN_STEP or not self._has_step or self.is_tail():
                self._read_step()
                if self._exchange(Status.EXTRA).extra < self._size:
                    flags = _FLAGS.get(origin, 0) | (Flag.DOOR if door_feature.get() is not None else 0)
                    self._agree_on_call(describe_call(method, group, args, flags), f" at {call_site()}")
            return call()

    def check_nested(self) -> None:
        """Check that no rank has joined before another Join is entered on the same group."""
        self._read_step()
        if self._exchange(Status.EXTRA).extra < self._size:
            self._agree_on_call(CallDescription(OPS.index("Join"), flags=Flag.NESTED), f" at {call_site()}")

    # A joined rank

    def join(self) -> None:
        """From now on this rank shadows the active ones."""
        self._read_step()
        self._has_joined = True

    def wait_for_step(self) -> Census:
        """Shadow calls between steps until active ranks begin one, or all have joined."""
        while True:
            census = self._exchange(Status.IDLE)
            if not census.extra:
                return census
            self._shadow_extra()

    def _shadow_extra(self) -> None:
        description = self._agree_on_call(None)
        group = self._groups.get(description.group)
        if group is None:
            raise StateError(
                f"rank {state_of(self.group).global_rank} has joined and can't make "
                f"{format_call(description)} for the active ranks: it does not know the group. Make groups "
                "before entering Join."
            )
        with _unwatched():
            shadow_call(description, group, self.device)

    # Exchanges

    def _launch(self, status: Status) -> comm.Handle[torch.Tensor]:
        value = torch.full((1,), int(status), dtype=torch.int64, device=self.device)
        with _unwatched():
            return comm.all_reduce(value, group=self.group, feature="join")

    def _exchange(self, status: Status) -> Census:
        return self._decode(int(self._launch(status).wait().item()))

    def _decode(self, total: int) -> Census:
        census = decode_census(total, self._size)
        problem = census.disagreement()
        if problem is not None:
            state = state_of(self.group)
            raise DesyncError(
                f"Join: rank {state.global_rank} found that {problem} Of the {self._size} ranks of "
                f"{state.words()}, {census.describe()}. No data was moved."
            )
        return census

    def _agree_on_call(self, description: CallDescription | None, site: str = "") -> CallDescription:
        """What the active ranks call next. Raises on every rank where it can't be shadowed."""
        state = state_of(self.group)
        given = encode_description(description, state.rank, self._size)
        vector = torch.tensor(given, dtype=torch.int64, device=self.device)
        with _unwatched():
            handle = comm.all_reduce(vector, dist.ReduceOp.MAX, self.group, feature="join")
        maxima = handle.wait().tolist()
        agreed, joined = decode_description(maxima)
        mine = "" if description is None else f" This rank is at {format_call(description)}{site}."
        if agreed is None:
            raise DesyncError(
                f"Join: the active ranks of {state.words()} are at different collectives.{mine} Make every "
                "rank take the same path to its collectives."
            )
        joined_ranks = [state.ranks[rank] for rank in joined]
        reason = refusal_reason(agreed, joined_ranks)
        if reason is not None:
            raise StateError(
                f"Join: ranks {joined_ranks} have no inputs left and can't take part in "
                f"{format_call(agreed)}, which the others call in the loop. {reason}{mine}"
            )
        return agreed


class StepHandle(comm.Handle[torch.Tensor]):
    """The exchange of STEP: a Handle of how many ranks make the step.

    Nobody has to wait for it. On a GPU the number is read beside the computation: waiting for it must not
    wait for what the rank has queued on its stream since.
    """

    __slots__ = ("_on_host", "_parent", "_ready")

    def __init__(self, parent: comm.Handle[torch.Tensor], device: torch.device) -> None:
        super().__init__((), None)  # type: ignore[arg-type]
        self._parent = parent
        self._ready: torch.cuda.Event | None = None
        if device.type == "cuda":
            # The copy is ordered behind the collective here, on a stream of its own, so that either
            # kind of wait, of a stream or of the host, is for this event and for nothing else.
            stream = _side_stream(device)
            with torch.cuda.stream(stream):
                total = parent.wait()
                total.record_stream(stream)
                self._on_host = total.to("cpu", non_blocking=True)
                self._ready = torch.cuda.Event()
                self._ready.record(stream)

    def _wait(self, timeout: float | None) -> None:
        self._result = self._parent.wait(timeout)
        if self._ready is None:
            self._is_waited = True  # on a GPU each stream that asks is ordered anew
        else:
            torch.cuda.current_stream(self._result.device).wait_event(self._ready)

    def read(self) -> int:
        """The sum of the ranks' statuses, on the host."""
        if self._ready is None:
            return int(self._parent.wait().item())
        self._ready.synchronize()
        return int(self._on_host.item())

    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._parent.is_done()

    def _is_missed(self) -> bool:
        return False  # whoever made it reads it


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


# Process-wide: which groups are watched, and what is replaced meanwhile

_install_mutex = threading.Lock()
_watches: dict[dist.ProcessGroup, list[JoinWatch]] = {}  # of each group, the innermost last
_originals: dict[tuple[Any, str], Any] = {}  # of each class or module and name; None: inherited
_thread = threading.local()  # .is_unwatched: this thread's calls are not watched


def innermost_watch(group: dist.ProcessGroup) -> JoinWatch | None:
    """The watch in force on the group: that of the Join entered last."""
    watches = _watches.get(group)
    return watches[-1] if watches else None


def _install_watch(watch: JoinWatch, groups: Sequence[dist.ProcessGroup]) -> None:
    with _install_mutex:
        for group in groups:
            _watches.setdefault(group, []).append(watch)
            for method in METHODS:
                _replace(type(group), method, functools.partial(_watched, method))
        for name in ("forward", "backward"):
            _replace(SyncBatchNorm, name, lambda original, name=name: staticmethod(_noted(name, original)))
        for module in (c10d, dist):
            for name in OBJECT_CALLS:
                _replace(module, name, functools.partial(_noted, name))


def _remove_watch(watch: JoinWatch) -> None:
    """The last watch that goes leaves everything as it was."""
    with _install_mutex:
        for group, watches in list(_watches.items()):
            if watch in watches:
                watches.remove(watch)
                if not watches:
                    del _watches[group]
        in_use = {type(group) for group in _watches}
        for owner, name in list(_originals):
            is_group = isinstance(owner, type) and issubclass(owner, dist.ProcessGroup)
            if owner not in in_use if is_group else not _watches:
                original = _originals.pop((owner, name))
                if original is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)


def _replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
    if (owner, name) not in _originals and hasattr(owner, name):
        _originals[owner, name] = vars(owner).get(name)
        setattr(owner, name, make(getattr(owner, name)))


@contextmanager
def _unwatched() -> Generator[None]:
    """Make calls that no watch sees, on this thread."""
    before = getattr(_thread, "is_unwatched", False)
    _thread.is_unwatched = True
    try:
        yield
    finally:
        _thread.is_unwatched = before


def _watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a process group that goes through the group's watch."""

    @functools.wraps(original)
    def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        watch = innermost_watch(group)
        if watch is None or getattr(_thread, "is_unwatched", False):
            return original(group, *args, **kwargs)
        _thread.is_unwatched = True  # as _unwatched() does, in less time: this is on every call's way
        try:
            given = (*args, *kwargs.values())
            return watch.around_call(name, group, given, lambda: original(group, *args, **kwargs))
        finally:
            _thread.is_unwatched = False

    return method


def _noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's that sets its name while it runs."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        token = _torch_call.set(name)
        try:
            return original(*args, **kwargs)
        finally:
            _torch_call.reset(token)

    return function
