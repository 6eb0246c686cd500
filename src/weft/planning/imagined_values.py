"""Tensors without work: what operations would bring, without doing them.

Under `Imagining` a tensor is an ordinary one of the CPU whose memory nobody writes, so the system never has
to provide it: seventy billion parameters fit. Its shape, strides, dtype, device and address are real, so all
of weft's code runs on it as it stands.

Few values matter: those that ranks tell each other, from which code decides what to do, and the numbers of
tokens. They begin as constants (torch.tensor, torch.zeros) or are drawn, and small operations on known values
are done, so their results are known, too. A result of few numbers, such as a loss or a norm, is taken to be
one, and what is asked of all values (torch.all, torch.any) to be as it should.

Private names of torch, used here and nowhere else: `torch.utils._python_dispatch.TorchDispatchMode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.errors import UnsupportedError
from weft.planning.operations import Args, Kwargs, is_about_values, is_for_dtensor, tensors_in, with_tensors

Op = Any  # torch._ops.OpOverload, whose attributes have no types

# Of a tensor whose values are kept. Code decides by integers; numbers to compute with would only take time.
_MOST_KNOWN_INTEGERS = 2**20
_MOST_KNOWN_FLOATS = 2**10
_FEW = 16  # numbers that are taken to be one
_KNOWN = "_weft_is_known"  # on a storage
_ALIASES = {"aten::_unsafe_view", "aten::lift_fresh", "aten::_reshape_alias"}
_UNFILLED = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"}


class Watch(Protocol):
    """Someone who hears of each operation, done or imagined."""

    def saw(
        self, op: Op, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *, is_view: bool
    ) -> None:
        """The operation has been called. Views are told too."""
        ...

    def saw_dtensor(self) -> None:
        """An operation on DTensors has been called; those on what is inside of them come next."""
        ...


@dataclass(frozen=True, slots=True)
class _Traits:
    """What a schema says of an operation."""

    is_view: bool
    is_in_place_view: bool
    is_random: bool
    is_unfilled: bool
    written: tuple[int | str, ...]  # arguments that are written: places, or names of keywords
    returned: tuple[int | str | None, ...]  # for each result the argument that it is, None for a new one


def is_known(tensor: torch.Tensor) -> bool:
    """Whether the tensor's values are what a real run would have."""
    return getattr(tensor.untyped_storage(), _KNOWN, False)


def set_known(tensor: torch.Tensor, known: bool) -> None:
    """Say whether they are."""
    setattr(tensor.untyped_storage(), _KNOWN, known)


class Imagining(TorchDispatchMode):
    """While it is entered, operations bring tensors of the right shapes and do no work."""

    lets_collectives_pass = True  # see weft.comm.fresh

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self._traits: dict[Op, _Traits] = {}
        self._results: dict[Any, Any] = {}

    def __torch_dispatch__(self, func: Op, types: Sequence[type], args: Args = (), kwargs: Any = None) -> Any:
        """Called by torch for each operation."""
        kwargs = kwargs or {}
        if is_for_dtensor(types):
            self._watch.saw_dtensor()
            return NotImplemented
        inputs = list(tensors_in((args, kwargs) if kwargs else args))
        if not is_about_values(types, inputs, kwargs):
            return func(*args, **kwargs)
        traits = self._traits.get(func)
        if traits is None:
            traits = self._traits[func] = _read_schema(func)
        if traits.is_view or traits.is_in_place_view:
            result = func(*args, **kwargs)
            if func.name() == "aten::lift_fresh":
                set_known(result, True)
        elif func.name() == "aten::_local_scalar_dense":
            result = func(*args) if is_known(args[0]) else _one_of(args[0].dtype)
        elif self._is_done(func, traits, args, kwargs, inputs):
            result = func(*args, **kwargs)
            for tensor in tensors_in(result):
                set_known(tensor, _may_be_known(tensor))
        else:
            result = self._imagine(func, traits, args, kwargs)
        self._watch.saw(
            func, inputs, list(tensors_in(result)), is_view=traits.is_view or traits.is_in_place_view
        )
        return result

    def _is_done(
        self,
        func: Op,
        traits: _Traits,
        args: Args,
        kwargs: Kwargs,
        inputs: Sequence[torch.Tensor],
    ) -> bool:
        """Whether to do the operation: its values are constants, or follow from known ones, and are few."""
        if traits.is_unfilled or not all(map(is_known, inputs)):
            return False
        if inputs:  # one number that was expanded is many
            return not traits.is_random and all(map(_may_be_known, inputs))
        return all(map(_may_be_known, tensors_in(self._shapes(func, args, kwargs))))

    def _imagine(self, func: Op, traits: _Traits, args: Args, kwargs: Kwargs) -> Any:
        for place in traits.written:
            for tensor in tensors_in(kwargs.get(place) if isinstance(place, str) else args[place]):
                set_known(tensor, False)
        if not _is_all_given(traits):
            made = with_tensors(_made, self._shapes(func, args, kwargs))
            for tensor in tensors_in(made):
                if tensor.numel() <= _FEW and not traits.is_unfilled:
                    tensor.fill_(not func.name().startswith("aten::any"))
                    set_known(tensor, True)
            return made
        found = [kwargs[place] if isinstance(place, str) else args[place] for place in traits.returned]  # type: ignore[index]
        return found[0] if len(found) == 1 else tuple(found) or None

    def _shapes(self, func: Op, args: Args, kwargs: Kwargs) -> Any:
        key = (func, _key(args), _key(tuple(kwargs.items())))
        if key not in self._results:
            self._results[key] = _shapes_of(func, args, kwargs)
        return self._results[key]


def _may_be_known(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= (_MOST_KNOWN_FLOATS if tensor.is_floating_point() else _MOST_KNOWN_INTEGERS)


def _is_all_given(traits: _Traits) -> bool:
    """Whether each result is one of the arguments."""
    return all(place is not None for place in traits.returned)


def _read_schema(func: Op) -> _Traits:
    schema = func._schema
    places: dict[str, int | str] = {}
    written: list[int | str] = []
    for at, argument in enumerate(schema.arguments):
        place = argument.name if argument.kwarg_only else at
        if argument.alias_info is not None:
            for name in argument.alias_info.before_set:
                places[name] = place
            if argument.alias_info.is_write:
                written.append(place)
    returned: list[int | str | None] = []
    for value in schema.returns:
        names = set() if value.alias_info is None else value.alias_info.before_set
        returned.append(next((places[name] for name in names if name in places), None))
    name = func.name().split(".")[0]
    return _Traits(
        is_view=(bool(places) and not written) or name in _ALIASES,
        is_in_place_view=torch.Tag.inplace_view in func.tags,
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        is_unfilled=name in _UNFILLED,
        written=tuple(written),
        returned=tuple(returned),
    )


def _shapes_of(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """The results as tensors without memory."""
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
    if "pin_memory" in kwargs:
        kwargs = {**kwargs, "pin_memory": None}
    try:
        return func(*with_tensors(_shape, args), **with_tensors(_shape, kwargs))
    except (NotImplementedError, RuntimeError) as error:
        raise UnsupportedError(
            f"plan: the model calls {func.name()}, whose result can't be told without its values: {error}"
        ) from error


def _shape(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _made(shape: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)


def _one_of(dtype: torch.dtype) -> Any:
    return 1.0 if dtype.is_floating_point else True if dtype is torch.bool else 1


def _key(value: Any) -> Any:
    """What a result's shape depends on, as something that can be looked up."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(_key(part) for part in value)  # type: ignore[reportUnknownVariableType]
    if isinstance(value, torch.Generator):
        return None
    return (type(value), value)
