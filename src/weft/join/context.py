"""The context in which ranks may run out of inputs at different times, and what takes part in it.

A Joinable communicates in every step of a loop. A rank that leaves its loop *joins*: it runs the JoinHooks of
its Joinables once for every step that another rank still makes, and leaves the context when all ranks have
joined. How ranks learn of each other is watch.py's work.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from weft.comm import Handle
from weft.comm.group import resolve_group
from weft.errors import ConfigError, StateError
from weft.join.watch import JoinWatch, innermost_watch
from weft.join.wire import MAX_GROUP_SIZE

_LARGE_SKEW = 1000  # steps


class JoinHook:
    """What a joined rank runs in a Joinable's place. Both methods do nothing unless overridden."""

    def main_hook(self) -> None:
        """Make the collectives of one step of the active ranks, in their order, with neutral values.

        Called once for each step that at least one rank still makes.
        """

    def post_hook(self, is_last_joiner: bool) -> None:
        """Do what is left to do when every rank has joined, on every rank.

        `is_last_joiner` is true on the ranks that made the most steps, one or several.
        """


@dataclass(frozen=True, slots=True)
class JoinConfig:
    """What a Joinable knows of the Join that it is in, if any."""

    enable: bool = False
    throw_on_early_termination: bool = False
    is_first_joinable: bool = False
    watch: JoinWatch | None = None  # None also in a group of one, and while a joined rank runs hooks


_OUTSIDE = JoinConfig()


class Joinable(ABC):
    """Something that communicates in every step and can be stood in for.

    It calls `Join.notify_join_context(self)` in each step before its first collective.
    All Joinables of one Join use the same group.

    What the methods of a subclass call is its own, for its hook to shadow. A subclass whose collectives all
    go through weft.comm under its own `feature` is declared with `calls_by_feature=True`: then those are.
    """

    _join_config: JoinConfig = _OUTSIDE

    # The `feature`s of its calls through weft.comm, those that its hook stands in for. None: of any
    # feature but "user".
    join_features: frozenset[str] | None = None

    def __init_subclass__(cls, *, calls_by_feature: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A class that weft makes for a module (`modules.give_class`) has no methods of the user's.
        if not calls_by_feature and "_weft_own_class" not in vars(cls):
            _attribute_methods(cls)

    def __init__(self) -> None:
        super().__init__()

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook that stands in for this object. `kwargs` are those given to Join, the same for all."""
        ...

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """Where the tensors lie with which Join itself communicates."""
        ...

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """The group of the ranks that join."""
        ...


# Of the methods that Python calls by itself, those in which a user's object communicates.
_SPECIAL = {"__call__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__", "__next__"}


def _attribute_methods(cls: type[Joinable]) -> None:
    """Make the collectives of a class' methods, inherited ones too, those of its Joinable."""
    for name, method in tuple(vars(cls).items()):
        if name.startswith("__") and name not in _SPECIAL:
            continue
        if inspect.isfunction(method):
            setattr(cls, name, _attributed(method))
        elif isinstance(method, property) and inspect.isfunction(method.fget):
            setattr(cls, name, property(_attributed(method.fget), method.fset, method.fdel, method.__doc__))
    for base in cls.__mro__[1:]:
        if base.__module__.partition(".")[0] in ("builtins", "abc", "typing", "torch", "weft"):
            continue
        for name, method in vars(base).items():
            is_attributed = issubclass(base, Joinable) or name in vars(cls) or not inspect.isfunction(method)
            if not is_attributed and (not name.startswith("__") or name in _SPECIAL):
                setattr(cls, name, _attributed(_inherited(cls, name, method)))


def _inherited(cls: type, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls the next class' own: which that is, a subclass may change."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(cls, self), name)(*args, **kwargs)

    return call


def _attributed(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a Joinable, whose collectives are the Joinable's while it is in a Join."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = getattr(self, "_join_config", _OUTSIDE).watch
        if watch is None:
            return method(self, *args, **kwargs)
        with watch.joinable_running():
            result = method(self, *args, **kwargs)
        return _run_attributed(result, watch) if inspect.isgenerator(result) else result

    return run


def _run_attributed(
    generator: Generator[Any, Any, Any], watch: JoinWatch
) -> Generator[Any, Any, Any]:  # what the loop over it does is not the Joinable's
    """The generator, whose collectives are the Joinable's each time that it goes on."""
    resume: Callable[[], Any] = functools.partial(next, generator)
    while True:
        try:
            with watch.joinable_running():
                item = resume()
        except StopIteration as stop:
            return stop.value
        try:
            sent = yield item
        except GeneratorExit:
            with watch.joinable_running():
                generator.close()
            raise
        except BaseException as error:
            resume = functools.partial(generator.throw, error)
        else:
            resume = functools.partial(generator.send, sent)


class Join:
    """Train on uneven inputs: ranks that have no more of them stand in for themselves.

    `joinables` take part in every step, the first of them first; their hooks run in this
    order. `kwargs` go to each one's `join_hook`. With `enable=False` the context does
    nothing. With `throw_on_early_termination` every rank raises RuntimeError as soon as
    one rank has no inputs left.

    An exception inside the block passes through, and the rank does not join: the
    others notice by the group's timeout, or at once where the group tells them.
    A Join can be entered again, one time after another.
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        self._joinables = _checked(joinables)
        self._hooks = [joinable.join_hook(**kwargs) for joinable in self._joinables]
        self._is_enabled = enable
        self._throws = throw_on_early_termination
        self._group = _common_group(self._joinables)
        self._device = self._joinables[0].join_device
        self._is_entered = False
        self._watch: JoinWatch | None = None

    def __enter__(self) -> Join:
        if not self._is_enabled:
            return self
        if self._is_entered:
            raise StateError("this Join has been entered already. Leave it before it is entered again.")
        if self._group.size() > 1:
            outer = innermost_watch(self._group)
            if outer is not None:
                outer.check_nested()
            covered = [joinable.join_features for joinable in self._joinables]
            features = None if None in covered else frozenset().union(*(some or () for some in covered))
            self._watch = JoinWatch(self._group, self._device, features)
            self._watch.install()
        self._is_entered = True
        self._configure(JoinConfig(True, self._throws, False, self._watch))
        self._joinables[0]._join_config = JoinConfig(True, self._throws, True, self._watch)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._is_entered:
            return
        watch, self._watch, self._is_entered = self._watch, None, False
        try:
            is_last_joiner = watch is None or (exc_type is None and self._shadow_steps(watch))
        finally:
            self._configure(_OUTSIDE)
            if watch is not None:
                watch.remove()
        if exc_type is None:
            for hook in self._hooks:
                hook.post_hook(is_last_joiner)

    def _configure(self, config: JoinConfig) -> None:
        for joinable in self._joinables:
            joinable._join_config = config

    def _shadow_steps(self, watch: JoinWatch) -> bool:
        """Run the main hooks until all ranks have joined. Returns whether this rank was among the last."""
        watch.join()
        self._configure(JoinConfig(True, self._throws))  # hooks may use the Joinables, and begin no steps
        num_steps = 0
        while not watch.wait_for_step().is_over:
            if self._throws:
                raise StateError(f"Rank {self._group.rank()} exhausted all inputs.")
            for hook in self._hooks:
                hook.main_hook()
            num_steps += 1
            if num_steps == _LARGE_SKEW + 1:
                warnings.warn(
                    f"Detected uneven input skew of greater than {_LARGE_SKEW}. This means that rank "
                    f"{self._group.rank()} has at least {_LARGE_SKEW} fewer inputs than other "
                    "currently-active ranks. This level of skew could lead to performance degradation "
                    "during training.",
                    stacklevel=3,
                )
        return num_steps == 0

    @staticmethod
    def notify_join_context(joinable: Joinable) -> Handle[torch.Tensor] | None:
        """Announce another step of this rank. A Joinable calls it before its first collective of a step.

        Only the first Joinable of a Join communicates: it gets a Handle whose tensor holds
        the number of ranks that make this step. The others, and those outside of a Join, get
        None. Raises RuntimeError under `throw_on_early_termination` when a rank has joined.
        """
        config = getattr(joinable, "_join_config", None)
        if not isinstance(config, JoinConfig):
            raise ConfigError(
                f"Check that the {type(joinable)} constructor calls the ``Joinable`` constructor: only a "
                "weft.join.Joinable can notify a Join."
            )
        if not config.enable:
            return None
        watch = config.watch
        if watch is None:  # a group of one
            return Handle((), torch.ones(1, dtype=torch.int64)) if config.is_first_joinable else None
        if innermost_watch(watch.group) is not watch:
            raise StateError(
                f"{type(joinable).__name__} is used inside a second Join on the same group, which it is not "
                "in. Pass all objects that communicate in the loop to one Join."
            )
        if not config.is_first_joinable:
            watch.check_step_begun(joinable)
            return None
        notice = watch.begin_step()
        if config.throw_on_early_termination and watch.is_tail():
            raise StateError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")
        return notice

    @staticmethod
    def num_active(joinable: Joinable) -> int | None:
        """How many ranks make the step that the Joinable has been notified of; None outside of a Join."""
        config = joinable._join_config
        if not config.enable:
            return None
        return 1 if config.watch is None else config.watch.num_active()


def _checked(joinables: Sequence[object]) -> list[Joinable]:
    if not joinables:
        raise ConfigError(
            "The join context manager requires at least one joinable. Pass the objects that communicate in "
            "the loop: Join([model, optimizer])."
        )
    given: list[Joinable] = []
    for one in joinables:
        if not isinstance(one, Joinable):
            raise ConfigError(
                f"Join got a {type(one).__name__}, which is not a Joinable. Pass "
                "weft.DistributedDataParallel, weft.ZeroRedundancyOptimizer or another subclass of "
                "weft.join.Joinable."
            )
        given.append(one)
    if len({id(one) for one in given}) < len(given):
        raise ConfigError("Join got the same joinable twice. Pass each one once.")
    return given


def _common_group(joinables: Sequence[Joinable]) -> dist.ProcessGroup:
    groups = [resolve_group(joinable.join_process_group) for joinable in joinables]
    if any(group is not groups[0] for group in groups):
        names = ", ".join(
            f"{type(one).__name__}: '{group.group_name}'"
            for one, group in zip(joinables, groups, strict=True)
        )
        raise ConfigError(
            f"Using join context manager with multiple process groups ({names}). Ranks join together, so "
            "give all joinables the same group."
        )
    if groups[0].size() > MAX_GROUP_SIZE:
        raise ConfigError(f"Join works with up to {MAX_GROUP_SIZE} ranks; this group has {groups[0].size()}.")
    return groups[0]
