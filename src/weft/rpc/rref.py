"""RRef: a reference to a value that lives on some worker."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch

from weft.errors import PeerError, PeerTimeoutError, RefusedError, StateError, UnfitError
from weft.rpc import proxy, registry, torch_names
from weft.rpc.constants import UNSET_RPC_TIMEOUT
from weft.rpc.failures import fresh_copy
from weft.rpc.owned import GlobalId, OwnedValue
from weft.rpc.packing import Cargo, Reference, current_cargo
from weft.rpc.workers import WorkerInfo

if TYPE_CHECKING:
    from weft.rpc.agent import Agent
    from weft.rpc.calls import CreationCall

T = TypeVar("T")


class RRef(Reference, Generic[T]):
    """A reference to a value on a worker, its owner. The value lives as long as any RRef to it.

    `RRef(value)` makes one to a local value; `remote()` makes one to a value on another worker. An RRef
    travels as (part of) an argument or a result of a call, and in no other way.
    """

    if not TYPE_CHECKING:

        def __class_getitem__(cls, item: Any) -> Any:
            # TorchScript knows torch's RRef[...] alone, and functions with such annotations get scripted.
            return torch_names.rref_annotation(item) or super().__class_getitem__(item)

    def __init__(self, value: T, type_hint: Any = None) -> None:
        agent = registry.current_agent(
            "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling "
            "`rpc.init_rpc`)?"
        )
        if type_hint is not None and not isinstance(value, torch.jit.ScriptModule):
            raise UnfitError(
                "type_hint should only be specified when the RRef being created contains a ScriptModule, and "
                f"this is a {type(value).__name__}."
            )
        owned = OwnedValue(agent.book.new_id())
        owned.set(value)
        self._init(agent, agent.info, owned.id, owned)

    def _init(
        self, agent: Agent, owner: WorkerInfo, rref_id: GlobalId, owned: OwnedValue | None = None
    ) -> None:
        self.agent = agent
        self.rref_id = rref_id
        self.fork_id = rref_id
        self.owned = owned  # on the owner
        self.is_deleted = False
        self._owner = owner
        self._error: BaseException | None = None
        self._creation: CreationCall | None = None
        self._is_confirmed = True
        self._type: torch.futures.Future[Any] | None = None

    @staticmethod
    def of_owned(agent: Agent, owned: OwnedValue) -> RRef[Any]:
        """An RRef on the owner, to a value that it has."""
        rref: RRef[Any] = RRef.__new__(RRef)
        rref._init(agent, agent.info, owned.id, owned)
        return rref

    @staticmethod
    def of_other(agent: Agent, owner: WorkerInfo, rref_id: GlobalId, fork_id: GlobalId) -> RRef[Any]:
        """An RRef to another worker's value."""
        rref: RRef[Any] = RRef.__new__(RRef)
        rref._init(agent, owner, rref_id)
        rref.fork_id = fork_id
        rref._is_confirmed = False
        return rref

    # What the agent and its book do

    def confirm(self) -> None:
        """The owner knows of this RRef."""
        self._is_confirmed = True

    def is_settled(self) -> bool:
        """Whether it is known what became of this RRef at its owner."""
        return self._is_confirmed or self._error is not None

    def fail(self, error: BaseException) -> None:
        """The value can't be had."""
        self._error = error

    def created_by(self, creation: CreationCall) -> None:
        """Hear from the call that makes the value."""
        self._creation = creation

    def limit_wait(self, timeout_secs: float) -> float:
        """How long to wait for the value: no longer than it may take to make it."""
        creation = self._creation
        if creation is None or creation.deadline is None or creation.is_done:
            return timeout_secs
        left_secs = max(0.001, creation.deadline - time.monotonic())
        return min(timeout_secs, left_secs) if timeout_secs else left_secs

    def delete(self) -> None:
        """Give this RRef up: the owner drops it from its list."""
        if not self.is_deleted and self.owned is None:
            self.is_deleted = True
            self.agent.drop_rref(self._owner.id, self.rref_id, self.fork_id)

    def __del__(self) -> None:
        if not getattr(self, "is_deleted", True):
            self.delete()

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_rref, (self.fork_into(current_cargo("it was pickled")),)

    def fork_into(self, cargo: Cargo) -> int:
        """Make a fork of it that goes into a message; its place in the cargo."""
        return self.agent.book.fork(self, cargo)

    def _serialize(self) -> tuple[Any, ...]:
        if self.is_deleted:
            raise StateError(f"{self}: Cannot call fork an UserRRef after deletion. RPC was shut down.")
        self.check_usable("_serialize()")
        return self.__reduce__()

    # What users do

    def owner(self) -> WorkerInfo:
        """The worker that has the value."""
        return self._owner

    def owner_name(self) -> str:
        """The name of the worker that has the value."""
        return self._owner.name

    def is_owner(self) -> bool:
        """Whether this worker has the value."""
        return self.owned is not None

    def confirmed_by_owner(self) -> bool:
        """Whether the owner knows of this RRef."""
        return self._is_confirmed or (
            self._creation is not None and self._creation.is_done and self._creation.error is None
        )

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """The value: a copy of the owner's, or the value itself on the owner. Waits until it is there.

        Raises what the function that makes it raised; PeerError when the owner is gone; a timeout error when
        it takes longer than `timeout` seconds (0: none).
        """
        self.check_usable("to_here()")
        if self.owned is not None:
            return self._wait_here(self.agent.resolve_timeout(timeout))
        return cast(T, self.agent.caller.fetch(self, timeout))

    def _wait_here(self, timeout_secs: float) -> T:
        assert self.owned is not None
        try:
            return self.owned.wait(self.limit_wait(timeout_secs), self.agent.pool.blocking)
        except PeerTimeoutError:
            self.check_usable("to_here()")  # the function that makes it may have run out of time, not this
            raise

    def local_value(self) -> T:
        """The value, on its owner."""
        if self.owned is None:
            raise StateError(
                f"For UserRRef(rref_id={self.rref_id}, fork_id={self.fork_id}), can't call localValue() on "
                f"user {self.agent.info}. Call it on owner {self._owner}"
            )
        return self.owned.wait(0, self.agent.pool.blocking)

    def check_usable(self, doing: str) -> None:
        """Raise when the value can't be had from here any more."""
        if self.is_deleted:
            raise StateError(f"{self}: Cannot call {doing} on it after deletion. RPC was shut down.")
        if self._error is not None:
            raise fresh_copy(self._error)
        if self._creation is not None and self._creation.error is not None:
            try:
                raise fresh_copy(self._creation.error)
            except PeerTimeoutError as error:
                raise PeerTimeoutError(
                    f"{self}: RRef creation via rpc.remote() timed out, and it is possible that the RRef on "
                    f"the owner node does not exist. {error}"
                ) from error
            except PeerError:
                raise
            except Exception as error:
                raise StateError(
                    f"{self}: RRef creation via rpc.remote() failed, and it is possible that the RRef on the "
                    f"owner node does not exist. {error}"
                ) from error

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """A proxy: `rref.rpc_sync().f(x)` calls the value's method `f` on the owner; its result."""
        return proxy.RRefProxy(self, "rpc_sync", timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """A proxy: `rref.rpc_async().f(x)` calls the value's method `f` on the owner; a future."""
        return proxy.RRefProxy(self, "rpc_async", timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """A proxy: `rref.remote().f(x)` calls the value's method `f` on the owner; an RRef."""
        return proxy.RRefProxy(self, "remote", timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run backward from the tensor that this RRef stands for, on its owner."""
        proxy.run_backward(self, dist_autograd_ctx_id, retain_graph)

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        future = self._type
        if future is None or (future.done() and proxy.is_failed(future)):
            future = self._type = proxy.ask_type(self, timeout)
        return future.wait() if blocking else future

    def _get_future(self) -> torch.futures.Future[Any]:
        if self._creation is not None:
            return self._creation.future()
        raise StateError(f"{self} was not made by rpc.remote(), so there is no future of its creation.")

    def __repr__(self) -> str:
        if self.owned is not None:
            return f"OwnerRRef({self.rref_id})"
        return f"UserRRef(RRefId = {self.rref_id}, ForkId = {self.fork_id})"


def local_value_of(rref: object) -> Any:
    """The value of an RRef that a peer sent to a function of weft's.

    Raises RefusedError for any other object, StateError for another worker's value.
    """
    if type(rref) is not RRef:
        raise RefusedError(
            f"a peer sent an object of type {type(rref).__qualname__} where an RRef is needed."
        )
    return cast("RRef[Any]", rref).local_value()


def rebuild_rref(index: int) -> RRef[Any]:
    """The RRef at a place in the cargo of the message that is being unpacked."""
    agent = registry.current_agent("an RRef arrived where RPC is not initialised")
    cargo = current_cargo("it was unpickled")
    fork, owned = agent.book.claim(cargo, index)
    owner_id, rref_id, fork_id, sender_id, _ = fork
    if owned is not None:
        rref = RRef.of_owned(agent, owned)
    else:
        rref = RRef.of_other(
            agent, agent.directory.find(owner_id).info, GlobalId(*rref_id), GlobalId(*fork_id)
        )
        if owner_id == sender_id:
            rref.confirm()
    agent.book.arrived(rref, fork, cargo)
    return rref
