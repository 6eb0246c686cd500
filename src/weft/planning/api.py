"""`plan`: what each strategy would need, best first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from weft.errors import ConfigError, WeftError
from weft.planning.job import Job
from weft.planning.machine import Link, Links, Machine
from weft.planning.models import ModelError, ModelSource, find_model
from weft.planning.simulate import Simulated, simulate
from weft.training.gradient_hooks import HOOKS, check_hook
from weft.training.layout import KINDS, Layout, plan_layout

GB = 10**9
MOST_RANKS = 10**6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Eight GPUs of 80 GB a host, with what such GPUs reach in practice and a network card for each.
EIGHT_GPUS = Machine(
    name="8 GPUs a host",
    device="cuda",
    memory_bytes=80 * GB,
    flops_per_sec=400e12,
    memory_bytes_per_sec=2e12,
    op_secs=5e-6,
    view_secs=0.0,
    links=Links(Link(300e9, 5e-6), Link(50e9, 10e-6), ranks_per_host=8),
)


@dataclass(frozen=True)
class PlanOptions:
    """What is asked for.

    `batch` are the sequences of a step of all ranks together; each data-parallel rank takes its part. Instead
    of it `batch_per_rank` says how many there are for each rank, whatever the strategy makes of them.
    """

    ranks: int
    strategies: Sequence[str] = tuple(KINDS)
    batch: int | None = None
    batch_per_rank: int | None = None
    context: int | None = None
    hook: str = "none"
    dtype: str = "fp32"
    tp: int | None = None
    shard: int | None = None

    @property
    def global_batch(self) -> int:
        """The sequences of a step."""
        return self.batch if self.batch is not None else self.ranks * (self.batch_per_rank or 1)


@dataclass(frozen=True)
class StrategyPlan:
    """What a strategy would need on one rank; `refusal` says why it can't be, where it can't."""

    strategy: str
    axes: tuple[tuple[str, int], ...] = ()
    step: Simulated | None = None
    memory_limit_bytes: int = 0
    tokens: int = 0  # of a step of all ranks
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Whether a rank has enough memory."""
        return self.step is not None and self.step.memory.total <= self.memory_limit_bytes

    @property
    def tokens_per_sec(self) -> float:
        """Of all ranks together."""
        return 0.0 if self.step is None else self.tokens / self.step.time.total_secs


def plan(
    model: str | Callable[[], Job], options: PlanOptions, machine: Machine = EIGHT_GPUS
) -> list[StrategyPlan]:
    """What each strategy would need for this model on so many ranks of this machine, best first.

    `model` is a name (see find_model), or a function that makes a Job. Nothing of the machine has to be
    there. This process must not be in a process group. Raises ConfigError for what no strategy can do.
    """
    check_plan_options(options)
    source = (
        find_model(model, options.context) if isinstance(model, str) else ModelSource(model.__name__, model)
    )
    plans = [_plan_one(source, strategy, options, machine) for strategy in options.strategies]
    return sorted(plans, key=_rank)


def check_plan_options(options: PlanOptions) -> None:
    """Raise ConfigError for what no strategy can do."""
    for name in ("ranks", "batch", "batch_per_rank", "context", "tp", "shard"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"plan: --{name.replace('_', '-')} must be at least 1; got {value}.")
    if options.ranks > MOST_RANKS:
        raise ConfigError(f"plan: --ranks must be at most {MOST_RANKS}; got {options.ranks}.")
    if options.batch is not None and options.batch_per_rank is not None:
        raise ConfigError("plan: --batch and --batch-per-rank say the same; give one of them.")
    if options.dtype not in DTYPES:
        raise ConfigError(f"plan: there is no dtype {options.dtype!r}; there are {', '.join(DTYPES)}.")
    if options.hook not in HOOKS:
        raise ConfigError(f"plan: there is no hook {options.hook!r}; there are {', '.join(HOOKS)}.")
    for strategy in options.strategies:
        if strategy not in KINDS:
            raise ConfigError(f"plan: there is no strategy {strategy!r}; there are {', '.join(KINDS)}.")


def _plan_one(source: ModelSource, strategy: str, options: PlanOptions, machine: Machine) -> StrategyPlan:
    try:
        layout = _lay_out(source, strategy, options)
        batch = options.global_batch // layout.num_shares
        dtype = DTYPES[options.dtype]
        step = simulate(source.make_job, layout, machine, batch=batch, hook=options.hook, dtype=dtype)
    except ModelError:
        raise  # it is not the strategy's fault
    except WeftError as error:
        refusal = str(error).splitlines()[0].removeprefix("train: ").removeprefix("plan: ")
        return StrategyPlan(strategy, refusal=refusal)
    return StrategyPlan(
        strategy, layout.axes, step, machine.memory_bytes, step.num_tokens * layout.num_shares
    )


def _lay_out(source: ModelSource, strategy: str, options: PlanOptions) -> Layout:
    kind = KINDS[strategy]
    if kind.data == "remote":
        raise ConfigError(
            "not planned: calls to rank 0 are no collectives, and what they take depends on how many ranks "
            "call at once."
        )
    # Sizes of axes hold for the strategies that have them.
    tp = options.tp if kind.has_tp and kind.data is not None else None
    shard = options.shard if kind.is_hybrid else None
    layout = plan_layout(strategy, options.ranks, tp=tp, shard=shard)
    check_hook(options.hook, layout)
    if source.num_heads is not None and source.num_heads % layout.tp_size:
        raise ConfigError(
            f"{source.name} has {source.num_heads} heads, which {layout.tp_size} ranks of a tp axis can't "
            "share out."
        )
    if options.global_batch % layout.num_shares:
        raise ConfigError(
            f"a batch of {options.global_batch} can't be cut into {layout.num_shares} equal parts, one for "
            "each data-parallel rank."
        )
    return layout


def _rank(plan: StrategyPlan) -> tuple[int, float]:
    if plan.step is None:
        return 2, 0.0
    return (0, -plan.tokens_per_sec) if plan.fits else (1, float(plan.step.memory.total))
