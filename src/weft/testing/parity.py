"""One body, run with torch and with weft: the same losses, gradients and parameters?

    def body(lib):
        model = lib.DistributedDataParallel(MLP())
        return train(model, [batch.shard() for batch in make_batches(MLP(), 3)])

    compare(body, torch.nn.parallel, weft, ranks=2)

Two copies of one mistake agree with each other (a DDP that never syncs equals another
one, and half of torch's own tests pass for it), so the ranks are also compared with
each other and with a single process that sees the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from weft.errors import ConfigError
from weft.launcher.api import launch
from weft.testing.pool import shared_pool
from weft.testing.trace import StepTrace, Trace

Kind = Literal["initial parameter", "loss", "gradient", "parameter", "buffer"]
Body = Callable[[Any], Trace]
Tensors = Mapping[str, torch.Tensor | None]

ALL_KINDS: tuple[Kind, ...] = ("initial parameter", "loss", "gradient", "parameter", "buffer")
# What every rank must have alike. Losses are of each rank's own rows, and so are BatchNorm's statistics.
RANK_KINDS: tuple[Kind, ...] = ("initial parameter", "gradient", "parameter")
# What a single process must have alike, once losses are averaged. BatchNorm's statistics are of other rows.
SINGLE_KINDS: tuple[Kind, ...] = ("initial parameter", "loss", "gradient", "parameter")

_ROUNDINGS = 64
_ROUNDINGS_OF_16_BITS = 4


@dataclass(frozen=True)
class Tolerance:
    """How far two numbers may be apart: `rtol * (the tensor's largest value) + atol`.

    The numbers differ because the same terms are summed in another order (over ranks, over rows), which
    moves a sum by some roundings of its *largest term*. So what is allowed follows the tensor's largest
    value and not each element: an element near zero is what large terms left over. By default `rtol` is 64
    roundings of the dtype (8e-6 in float32, 1.4e-14 in float64), far below a forgotten factor, rank or row;
    4 in 16 bits (0.03 in bfloat16, 0.004 in float16), where kernels sum in float32 and round at the end.
    `atol` is a sixteenth of that, of the largest value that any tensor of the kind has in that step: a
    gradient that is zero but for rounding (a bias in front of BatchNorm) has no size of its own to go by.

    `exact`: every bit. Integers are compared so in any case. A NaN differs from everything, unless
    `equal_nan`: after a run has diverged, all comparisons hold.
    """

    exact: bool = False
    rtol: float | None = None
    atol: float | None = None
    equal_nan: bool = False

    def allowed(self, dtype: torch.dtype, tensor_scale: float, step_scale: float) -> float:
        """The largest difference that passes."""
        if self.exact or not (dtype.is_floating_point or dtype.is_complex):
            return 0.0
        roundings = _ROUNDINGS if torch.finfo(dtype).bits > 16 else _ROUNDINGS_OF_16_BITS
        usual = roundings * torch.finfo(dtype).eps
        rtol = usual if self.rtol is None else self.rtol
        atol = usual / 16 * step_scale if self.atol is None else self.atol
        return rtol * tensor_scale + atol


CLOSE = Tolerance()
EXACT = Tolerance(exact=True)


class Bare:
    """A library that does nothing: every name of it is a function that gives its first argument back.

    `bare.DistributedDataParallel(model, ...)` is the model: a body runs as a single process would.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _first_argument

    def __reduce__(self) -> str:
        return "bare"


bare = Bare()


def assert_same(
    first: Trace,
    second: Trace,
    *,
    tolerance: Tolerance = CLOSE,
    kinds: Sequence[Kind] = ALL_KINDS,
    names: tuple[str, str] = ("first", "second"),
) -> None:
    """Raise AssertionError that names the first difference: step, kind, fqn, place, both values.

    The first trace is the one that is right. `names` are what the message calls them.
    """
    words = find_difference(first, second, tolerance=tolerance, kinds=kinds, names=names)
    if words is not None:
        raise AssertionError(f"{names[0]} and {names[1]} differ at {words}")


def assert_ranks_agree(traces: Sequence[Trace], *, kinds: Sequence[Kind] = RANK_KINDS) -> None:
    """Raise AssertionError unless all ranks have the same parameters and gradients, to the bit.

    To the bit, since ranks add the same numbers in the same order; where they do not, they drift apart.
    """
    for trace in traces[1:]:
        names = (f"rank {traces[0].rank}", f"rank {trace.rank}")
        assert_same(traces[0], trace, tolerance=EXACT, kinds=kinds, names=names)


def compare(
    body: Body,
    reference: Any,
    candidate: Any,
    *,
    ranks: int = 2,
    kind: Literal["thread", "process"] = "thread",
    backend: str | None = None,
    timeout: float = 60.0,
    single: Any = bare,
    ranks_agree: bool = True,
    tolerance: Tolerance = CLOSE,
) -> list[Trace]:
    """Run `body(library)` on every rank with each library and compare; return the candidate's traces by rank.

    Compared: the candidate's ranks with each other (not with ranks_agree=False: gradients that are not
    synced), each rank with the reference's, and each rank with `body(single)` in a world of one, where the
    loss is the mean of the ranks'. For that the body takes `batch.shard()` of each batch and its loss is a
    mean over rows. `single=None` leaves it out: for BatchNorm, or a body that a single process can't run.
    `reference=None` is for what torch does not have. Process-ranks come from shared_pool and get the
    libraries by pickle, which modules and `bare` survive.

    Raises AssertionError with the first difference, ConfigError where there is nothing to compare with.
    """
    if reference is None and single is None:
        raise ConfigError("compare: give a reference or a single, or there is nothing to compare with.")

    def run(library: Any, ranks: int, kind: Literal["thread", "process"]) -> list[Trace]:
        if kind == "process":
            pool = shared_pool(ranks)
            traces = pool.run(body, args=(library,), backend=backend, timeout=timeout, by_value=True)
        else:
            traces = launch(body, ranks=ranks, kind=kind, backend=backend, timeout=timeout, args=(library,))
        check_traces(traces)
        return traces

    traces = run(candidate, ranks, kind)
    if ranks_agree:
        assert_ranks_agree(traces)
    if reference is not None:
        for right, trace in zip(run(reference, ranks, kind), traces, strict=True):
            assert_same(right, trace, tolerance=tolerance, names=("reference", "candidate"))
    if single is not None:
        (right,) = run(single, 1, "thread")
        for trace in with_mean_losses(traces):
            assert_same(
                right, trace, tolerance=tolerance, kinds=SINGLE_KINDS, names=("single process", "candidate")
            )
    return traces


def check_traces(traces: Sequence[object]) -> None:
    """Check what a body returned: traces, with steps in them."""
    for rank, trace in enumerate(traces):
        if not isinstance(trace, Trace) or not trace.steps:
            raise ConfigError(
                f"compare: the body must return the Trace of at least one step; on rank {rank} it returned "
                f"{'a Trace without steps' if isinstance(trace, Trace) else repr(trace)}."
            )


def with_mean_losses(traces: Sequence[Trace]) -> list[Trace]:
    """The traces with each step's loss averaged over all of them."""
    steps_by_place = list(zip(*(trace.steps for trace in traces), strict=True))
    means = [torch.stack([step.loss for step in steps]).mean(0) for steps in steps_by_place]
    return [
        replace(trace, steps=tuple(replace(s, loss=mean) for s, mean in zip(trace.steps, means, strict=True)))
        for trace in traces
    ]


def find_difference(
    first: Trace,
    second: Trace,
    *,
    tolerance: Tolerance = CLOSE,
    kinds: Sequence[Kind] = ALL_KINDS,
    names: tuple[str, str] = ("first", "second"),
) -> str | None:
    """Say where two traces differ first, in the order of the run; None if they don't."""
    for (where, kind, ours), (_, _, theirs) in zip(_parts(first), _parts(second), strict=False):
        if kind not in kinds:
            continue
        comparison = _Comparison(tolerance, _scale_of(ours), names)
        for fqn in [*ours, *(fqn for fqn in theirs if fqn not in ours)]:
            if fqn not in ours or fqn not in theirs:
                words = f"only {names[0] if fqn in ours else names[1]} has it"
            else:
                words = comparison.find(ours[fqn], theirs[fqn])
            if words is not None:
                named = kind if kind == "loss" else f"{kind} of '{fqn}'"
                return f"{where}, {named}, rank {second.rank}: {words}"
    if len(first.steps) != len(second.steps):
        return f"their end, rank {second.rank}: {len(first.steps)} steps and {len(second.steps)} steps"
    return None


def _parts(trace: Trace) -> Iterator[tuple[str, Kind, Tensors]]:
    """All that is compared, in the order in which it came about."""
    yield "the start", "initial parameter", trace.initial
    for number, step in enumerate(trace.steps):
        yield from _parts_of_step(f"step {number}", step)


def _parts_of_step(where: str, step: StepTrace) -> Iterator[tuple[str, Kind, Tensors]]:
    yield where, "loss", {"": step.loss}
    yield where, "gradient", step.gradients
    yield where, "parameter", step.parameters
    yield where, "buffer", step.buffers


def _scale_of(tensors: Tensors) -> float:
    """The largest value of all of them."""
    return max((_largest(_wide(tensor)) for tensor in tensors.values() if tensor is not None), default=0.0)


@dataclass(frozen=True)
class _Comparison:
    """Compares the tensors of one kind in one step."""

    tolerance: Tolerance
    step_scale: float
    names: tuple[str, str]

    def find(self, ours: torch.Tensor | None, theirs: torch.Tensor | None) -> str | None:
        """Say how two tensors differ; None if they don't."""
        if ours is None or theirs is None:
            return None if ours is theirs else self._both(_presence(ours), _presence(theirs))
        for what in ("shape", "dtype", "layout"):
            seen = (getattr(ours, what), getattr(theirs, what))
            if seen[0] != seen[1]:
                return f"{what}: {self._both(*seen)}"
        return self._find_values(ours, theirs)

    def _find_values(self, ours: torch.Tensor, theirs: torch.Tensor) -> str | None:
        right, seen = _wide(ours), _wide(theirs)
        if right.numel() == 0:
            return None
        is_nan = right.isnan() | seen.isnan()
        apart = torch.where(right == seen, 0.0, (right - seen).abs())  # inf equals inf
        if self.tolerance.equal_nan:
            apart = torch.where(right.isnan() & seen.isnan(), 0.0, apart)
        else:
            apart = torch.where(is_nan, torch.inf, apart)
        apart = apart.nan_to_num(nan=torch.inf, posinf=torch.inf)
        allowed = self.tolerance.allowed(ours.dtype, _largest(right), self.step_scale)
        num_apart = int((apart > allowed).sum())
        if num_apart == 0:
            return None
        index = torch.unravel_index(apart.argmax(), apart.shape)
        place = [int(i) for i in index]
        values = self._both(ours.to_dense()[index].item(), theirs.to_dense()[index].item())
        return (
            f"{num_apart} of {right.numel()} elements differ, most of all at {place}: {values} "
            f"({float(apart[index]):.3g} apart, {allowed:.3g} allowed)"
        )

    def _both(self, ours: object, theirs: object) -> str:
        return f"{self.names[0]} {ours}, {self.names[1]} {theirs}"


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a dtype in which the difference of two values is exact enough to judge."""
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return dense.to(torch.complex128 if dense.dtype.is_complex else torch.float64)


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor.abs().nan_to_num(0.0, 0.0, 0.0)
    return float(finite.max()) if finite.numel() else 0.0


def _presence(tensor: torch.Tensor | None) -> str:
    return "has none (None)" if tensor is None else f"has one of {list(tensor.shape)}"


def _first_argument(first: Any, *args: Any, **kwargs: Any) -> Any:
    return first
