"""Who holds what: the counting that lets a value live exactly as long as somebody has an RRef to it.

Each RRef outside of the owner is a *fork* with an id of its own, which the owner has on its list (`holders`).

- The owner sends an RRef: it puts the new fork on its list when the message is packed.
- Another worker sends one on: it keeps its own RRef alive (a *pin*) until the receiver says that the owner
  has the new fork on its list ("fork" to the owner, "forked" back, then "accept" to the sender). The same pin
  keeps an RRef alive that travels to its owner, until that says "accept", or answers the call that it was in
  (however late: a call that is never answered keeps it until that worker is gone).
- An RRef dies: "drop" takes its fork off the list. The value goes with the last one.
- A worker dies: its forks go off every list, and pins for it are released.

Links keep messages in order, so a "drop" never overtakes what it undoes. Everything here is told on one
thread at a time by the agent, or from callers' threads; no method waits.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from weft.errors import PeerError, RefusedError, StateError
from weft.rpc.owned import GlobalId, OwnedValue
from weft.rpc.packing import Cargo

if TYPE_CHECKING:
    from weft.rpc.rref import RRef

# (owner's id, the value, this fork, who sent it, whether it goes to its owner in a call)
Fork = tuple[int, tuple[int, int], tuple[int, int], int, bool]


class RRefBook:
    """The RRefs of one worker, whose ids begin with `first_id`.

    `tell(worker_id, notice)` sends a notice to another worker, or drops it if that is gone; `tell_later` does
    so with the next message to it, or soon. `let_go(things)` drops values and RRefs where their finalizers,
    which are users' code, may wait.
    """

    def __init__(
        self,
        own_id: int,
        first_id: int,
        tell: Callable[[int, tuple[Any, ...]], None],
        tell_later: Callable[[int, tuple[Any, ...]], None],
        is_lost: Callable[[int], bool],
        let_go: Callable[[list[Any]], None],
    ) -> None:
        self._own_id = own_id
        self._tell = tell
        self._tell_later = tell_later
        self._is_lost = is_lost
        self._let_go = let_go
        self._ids = itertools.count(first_id)
        self._lock = threading.Lock()
        self._owned: dict[GlobalId, OwnedValue] = {}  # those that others hold, or that are being made
        self._pins: dict[GlobalId, tuple[RRef[Any], int]] = {}  # by fork: what it was made from, for whom
        self._unanswered: dict[int, Sequence[GlobalId]] = {}  # by call: forks pinned until its answer
        self._unconfirmed: dict[GlobalId, tuple[int, int, weakref.ref[RRef[Any]]]] = {}  # owner, sender, it
        self._confirmed = threading.Condition()
        self._is_closed = False
        self._users: dict[GlobalId, weakref.ref[RRef[Any]]] = {}

    def new_id(self) -> GlobalId:
        """An id that nobody else gives out."""
        return GlobalId(self._own_id, next(self._ids))

    # What this worker owns

    def create(self, rref_id: GlobalId, fork_id: GlobalId | None, holder_id: int) -> OwnedValue:
        """Own a value that is to be made, for a holder; it is kept for itself where there is no fork."""
        with self._lock:
            owned = self._owned.setdefault(rref_id, OwnedValue(rref_id))
            owned.promised_by = None
            if fork_id is not None and not self._is_lost(holder_id):
                owned.holders[fork_id] = holder_id
            return owned

    def _find_or_promise(self, rref_id: GlobalId, sender_id: int) -> OwnedValue | None:
        """A value of this worker's that a worker sent an RRef to; None when it is gone. The lock is held.

        The call that makes it comes from its creator; an RRef to it may come from a third worker, and be
        faster. While that worker lives it holds the value, or the promise of it.
        """
        owned = self._owned.get(rref_id)
        if owned is None and rref_id.created_on != self._own_id and not self._is_lost(sender_id):
            owned = self._owned[rref_id] = OwnedValue(rref_id)
            owned.promised_by = sender_id
        return owned

    def find(self, rref_id: GlobalId) -> OwnedValue | None:
        """A value that others hold."""
        return self._owned.get(rref_id)

    def release_unheld(self, owned: OwnedValue) -> None:
        """Forget a value that was made for nobody else."""
        with self._lock:
            if not owned.holders:
                self._owned.pop(owned.id, None)

    # RRefs that leave

    def fork(self, rref: RRef[Any], cargo: Cargo) -> int:
        """Make a fork of an RRef that goes into a message; its place in the cargo."""
        if rref.is_deleted:
            raise StateError(f"{rref}: Cannot call fork an UserRRef after deletion. RPC was shut down.")
        rref.check_usable("fork()")
        fork_id, owner_id = self.new_id(), rref.owner().id
        is_home = rref.owned is None and cargo.is_answered and owner_id == cargo.peer_id
        if is_home:
            cargo.homeward.append(fork_id)
        with self._lock:
            if rref.owned is not None and cargo.peer_id != self._own_id:
                rref.owned.holders[fork_id] = cargo.peer_id
                self._owned[rref.owned.id] = rref.owned
            else:
                self._pins[fork_id] = (rref, cargo.peer_id)
        cargo.forks.append((owner_id, tuple(rref.rref_id), tuple(fork_id), self._own_id, is_home))
        return len(cargo.forks) - 1

    def undo(self, cargo: Cargo) -> None:
        """Take back the forks of a message that was not sent."""
        for owner_id, rref_id, fork_id, _, _ in cargo.forks:
            if owner_id == self._own_id and cargo.peer_id != self._own_id:
                self.on_drop(cargo.peer_id, [(rref_id, fork_id)])
            else:
                self._unpin(GlobalId(*fork_id))

    def await_answer(self, call_id: int, homeward: Sequence[GlobalId]) -> None:
        """Keep RRefs alive that go to their owner in a call, until it is answered."""
        self._unanswered[call_id] = homeward

    def on_answer(self, call_id: int) -> None:
        """A call is answered, whoever still waits for it; or it was not sent."""
        for fork_id in self._unanswered.pop(call_id, ()):
            self._unpin(fork_id)

    # RRefs that arrive

    def claim(self, cargo: Cargo, index: int) -> tuple[Fork, OwnedValue | None]:
        """Take a fork out of the cargo of a message that arrived; and its value, on the owner."""
        if not 0 <= index < len(cargo.forks) or not cargo.forks[index]:
            raise RefusedError(
                "a message refers to an RRef that is not in its list of forks, or to one twice."
            )
        fork = cargo.forks[index]
        owner_id, rref_id, fork_id, sender_id, _ = fork
        owned: OwnedValue | None = None
        if owner_id == self._own_id:
            with self._lock:
                pin = self._pins.get(GlobalId(*fork_id)) if sender_id == self._own_id else None
                owned = (
                    pin[0].owned if pin is not None else self._find_or_promise(GlobalId(*rref_id), sender_id)
                )
            if owned is None:
                raise PeerError(
                    f"OwnerRRef({GlobalId(*rref_id)}): the value is gone: worker {sender_id}, which sent it "
                    "here, died before it arrived.",
                    [sender_id],
                )
        cargo.forks[index] = ()
        return fork, owned

    def arrived(self, rref: RRef[Any], fork: Fork, cargo: Cargo) -> None:
        """Say that an RRef which arrived is in use here."""
        owner_id, rref_id, fork_id, sender_id, is_home = fork
        if owner_id == self._own_id:
            if not is_home:
                self._accept(sender_id, GlobalId(*fork_id))
            return
        self.add_user(rref)
        if owner_id != sender_id:
            self._unconfirmed[GlobalId(*fork_id)] = (owner_id, sender_id, weakref.ref(rref))
            cargo.unconfirmed.append(rref)
            self._tell(owner_id, ("fork", rref_id, fork_id, sender_id))
            if self._is_lost(owner_id):
                self._fail_unconfirmed(owner_id)

    def wait_confirmed(self, rrefs: Sequence[RRef[Any]]) -> None:
        """Wait until the owners know of these RRefs, or are gone."""
        with self._confirmed:
            self._confirmed.wait_for(lambda: self._is_closed or all(rref.is_settled() for rref in rrefs))

    def close(self) -> None:
        """Hold nothing any more: RRefs that outlive the worker hold this."""
        with self._lock:
            held = [*self._owned.values(), *self._pins.values()]
            self._owned.clear()
            self._pins.clear()
            self._unanswered.clear()
        del held  # not under the lock
        self._users.clear()
        self._unconfirmed.clear()
        with self._confirmed:
            self._is_closed = True
            self._confirmed.notify_all()

    def give_back(self, cargo: Cargo) -> None:
        """Give back the forks of a message that could not be unpacked whole."""
        for fork in cargo.forks:
            if not fork:
                continue
            owner_id, rref_id, fork_id, sender_id, is_home = fork
            if owner_id == sender_id and owner_id != self._own_id:
                self._tell(owner_id, ("drop", [(rref_id, fork_id)]))
            elif not is_home:
                self._accept(sender_id, GlobalId(*fork_id))

    def _accept(self, sender_id: int, fork_id: GlobalId) -> None:
        if sender_id == self._own_id:
            self._unpin(fork_id)
        else:
            self._tell_later(sender_id, ("accept", fork_id))  # with the answer, as a rule

    def _unpin(self, fork_id: GlobalId) -> None:
        with self._lock:
            pin = self._pins.pop(fork_id, None)
        if pin is not None and pin[0].owned is not None:  # else no value of users' goes with it
            self._let_go([pin])

    # RRefs that this worker uses

    def add_user(self, rref: RRef[Any]) -> None:
        """Remember an RRef to another worker's value."""
        self._users[rref.fork_id] = weakref.ref(rref)

    def drop_users(self, owner_id: int, gone: Sequence[tuple[GlobalId, GlobalId]]) -> None:
        """Tell an owner that RRefs here are gone: their values and forks."""
        for _, fork_id in gone:
            self._users.pop(fork_id, None)
        self._tell(owner_id, ("drop", [(tuple(rref_id), tuple(fork_id)) for rref_id, fork_id in gone]))

    def delete_all_users(self) -> None:
        """Give up every RRef to other workers' values; they can't be used after this."""
        for reference in list(self._users.values()):
            rref = reference()
            if rref is not None:
                rref.delete()

    # What other workers say

    def on_drop(self, sender_id: int, gone: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> None:
        """RRefs of a holder are gone."""
        released: list[Any] = []
        with self._lock:
            for rref_id, fork_id in gone:
                owned, fork = self._owned.get(GlobalId(*rref_id)), GlobalId(*fork_id)
                # A worker may drop only its own forks.
                if owned is not None and owned.holders.get(fork) == sender_id:
                    del owned.holders[fork]
                    released.append(owned)
                    if not owned.holders and owned.promised_by is None:
                        del self._owned[owned.id]
            owned = None  # only the list holds what goes
        self._let_go(released)

    def on_fork(self, sender_id: int, rref_id: GlobalId, fork_id: GlobalId, parent_id: int) -> None:
        """A worker has an RRef to a value of this one, from a third."""
        with self._lock:
            owned = self._find_or_promise(rref_id, parent_id)
            if owned is not None and not self._is_lost(sender_id):
                owned.holders.setdefault(fork_id, sender_id)
        self._tell(sender_id, ("forked", fork_id, owned is not None))

    def on_forked(self, sender_id: int, fork_id: GlobalId, is_there: bool) -> None:
        """The owner has one of this worker's RRefs on its list, or has that value no more."""
        owner_id, parent_id, reference = self._unconfirmed.get(fork_id, (0, None, None))
        if parent_id is None or reference is None or owner_id != sender_id:
            return
        self._unconfirmed.pop(fork_id, None)
        rref = reference()
        if rref is not None and is_there:
            rref.confirm()
        elif rref is not None:
            why = f"the value is gone: worker {parent_id}, which sent it, died before its owner knew of it."
            rref.fail(PeerError(f"{rref}: {why}", [parent_id]))
        with self._confirmed:
            self._confirmed.notify_all()
        self._accept(parent_id, fork_id)

    def on_accept(self, sender_id: int, fork_id: GlobalId) -> None:
        """The receiver of an RRef that this worker sent on reports that the owner knows of it."""
        pin = self._pins.get(fork_id)
        if pin is not None and pin[1] == sender_id:
            self._unpin(fork_id)

    def on_lost(self, peer_id: int) -> None:
        """A worker is gone, with all that it held."""
        with self._lock:
            promised = [
                owned
                for owned in self._owned.values()
                if owned.promised_by is not None and peer_id in (owned.promised_by, owned.id.created_on)
            ]
            dead = [pin for pin, (_, dest_id) in self._pins.items() if dest_id == peer_id]
            pinned = [self._pins.pop(fork_id) for fork_id in dead]
            for call_id, forks in list(self._unanswered.items()):
                if not any(fork_id in self._pins for fork_id in forks):
                    self._unanswered.pop(call_id, None)
            released = [owned for owned in self._owned.values() if peer_id in owned.holders.values()]
            for owned in released:
                owned.holders = {fork: holder for fork, holder in owned.holders.items() if holder != peer_id}
                if not owned.holders and owned.promised_by is None:
                    del self._owned[owned.id]
            going, owned = [*pinned, *released], None
            del pinned, released
        self._let_go(going)
        for owned in promised:
            why = f"worker {peer_id}, which was to have it made or had it, died before it was."
            owned.set(error=PeerError(f"OwnerRRef({owned.id}): there is no value: {why}", [peer_id]))
        self._fail_unconfirmed(peer_id)

    def _fail_unconfirmed(self, owner_id: int) -> None:
        """Give up RRefs whose owner died before it knew of them."""
        for fork_id, (unconfirmed_owner, parent_id, reference) in list(self._unconfirmed.items()):
            if unconfirmed_owner == owner_id and self._unconfirmed.pop(fork_id, None) is not None:
                rref = reference()
                if rref is not None:
                    rref.fail(PeerError(f"{rref}: its owner, worker {owner_id}, is gone.", [owner_id]))
                self._accept(parent_id, fork_id)
        with self._confirmed:
            self._confirmed.notify_all()

    # How many there are

    def counts(self) -> dict[str, int]:
        """The numbers that torch's debug info has."""
        with self._lock:
            num_forks = sum(len(owned.holders) for owned in self._owned.values())
            return {
                "num_owner_rrefs": len(self._owned),
                "num_pending_users": len(self._unconfirmed),
                "num_forks": num_forks,
            }
