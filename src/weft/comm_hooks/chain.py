"""More than one hook on a model: `chain(...)` makes one of several.

Stages run from left to right on the same bucket. A stage is
- a hook, or a pair (state, hook): it gets the bucket with what the stage before it
  made, and its result is what the next one gets;
- a wrapper (a callable of one argument, hook -> hook, such as `fp16_compress_wrapper`):
  it goes around all stages behind it.

    chain((host_group, allreduce_hook), (cross_group, fp16_compress_hook))  # far ranks in 16 bits
    chain(fp16_compress_wrapper, (state, powerSGD_hook))  # factors in 16 bits

So the mean is right if the groups of the reducing stages together make up the whole. Of a sharded module's
bucket the last stage may leave this rank's part only; those before it must leave all. A chain is itself
a hook and may be a stage. Its `state_dict` holds those of all its stages' states.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.futures import Future

from weft.comm.group import resolve_group
from weft.comm_hooks.bucket import GradBucket, GradHook
from weft.comm_hooks.in_order import run_in_order
from weft.comm_hooks.mean import only_tensor
from weft.errors import ConfigError

Wrapper = Callable[[GradHook], GradHook]
Stage = GradHook | Wrapper | tuple[Any, GradHook]


def chain(*stages: Stage) -> Chain:
    """One hook of several stages; register it with `model.register_comm_hook(None, hook)`."""
    if not stages:
        raise ConfigError("chain: give at least one hook.")
    return Chain(stages)


class Chain:
    """Hooks that run one after another on each bucket. Made by `chain`."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = tuple(stages)
        names = [getattr(_hook_of(stage), "__qualname__", repr(stage)) for stage in self._stages]
        self._hook = _compose(self._stages)
        self.__name__ = self.__qualname__ = f"chain({', '.join(names)})"

    def __call__(self, state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        """Run the stages. `state` is not used: each stage has its own."""
        return self._hook(None, bucket)

    def state_dict(self) -> dict[str, Any]:
        """The states of the stages that have one, by the stage's place."""
        return {str(place): state.state_dict() for place, state in self._states().items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give each stage its state back. The chain must have the same stages as the one saved."""
        states = {str(place): state for place, state in self._states().items()}
        if states.keys() != state_dict.keys():
            raise ConfigError(
                f"Chain.load_state_dict: {self.__name__} has states at {sorted(states)}; the saved chain "
                f"has them at {sorted(state_dict)}. Make the chain from the same stages."
            )
        for place, state in states.items():
            state.load_state_dict(state_dict[place])

    def calls(self) -> list[tuple[Any, Any]]:
        """The state and the hook of each stage; wrappers have none and are left out."""
        pairs = [stage if isinstance(stage, tuple) else (None, stage) for stage in self._stages]
        return [(state, hook) for state, hook in pairs if state is not None or not _is_wrapper(hook)]

    def _states(self) -> dict[int, Any]:
        parts = [stage[0] if isinstance(stage, tuple) else stage for stage in self._stages]
        return {place: part for place, part in enumerate(parts) if hasattr(part, "state_dict")}

    def __reduce__(self) -> tuple[type[Chain], tuple[tuple[Stage, ...]]]:
        return Chain, (self._stages,)


def _compose(stages: tuple[Stage, ...]) -> GradHook:
    for place, stage in enumerate(stages):
        if not isinstance(stage, tuple) and _is_wrapper(stage):
            if place == len(stages) - 1:
                raise ConfigError(f"chain: the wrapper {stage!r} has no hook behind it.")
            inner = stage(_compose(stages[place + 1 :]))  # type: ignore[call-arg]
            return _in_sequence((*stages[:place], inner))  # type: ignore[arg-type]
    return _in_sequence(stages)


def _in_sequence(stages: tuple[Any, ...]) -> GradHook:
    calls = [stage if isinstance(stage, tuple) else (None, stage) for stage in stages]
    if len(calls) == 1:
        state, hook = calls[0]
        return lambda _, bucket: hook(state, bucket)

    def run(_: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        def body() -> torch.Tensor:
            buffer = bucket.buffer()
            for place, (state, hook) in enumerate(calls, 1):
                given = bucket if place == len(calls) else bucket.as_whole()
                result = only_tensor(hook(state, given.with_buffer(buffer)).wait())
                buffer = result if result.layout is not torch.strided else result.view(buffer.shape)
            return buffer

        # On the world's queue whatever groups the stages use: bodies there may wait for bodies of other
        # groups, and none of those waits for one here, so there is no circle.
        return run_in_order(resolve_group(None), bucket.buffer(), body)

    return run


def _hook_of(stage: Stage) -> Any:
    hook = stage[1] if isinstance(stage, tuple) and len(stage) == 2 else stage
    if not callable(hook):
        raise ConfigError(f"chain: a stage is a hook, (state, hook) or a wrapper of hooks; got {stage!r}.")
    return hook


def _is_wrapper(hook: Callable[..., Any]) -> bool:
    required = [
        parameter
        for parameter in inspect.signature(hook).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return len(required) == 1
