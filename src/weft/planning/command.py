"""`weft plan`: its arguments, and what becomes of its errors."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, WeftError
from weft.planning.api import EIGHT_GPUS, PlanOptions, StrategyPlan, plan
from weft.planning.calibrate import calibrate
from weft.planning.machine import Machine
from weft.planning.page import show_plans
from weft.planning.profile import default_path, load_profile, save_profile
from weft.planning.units import read_bytes, read_count, read_secs, show_bytes, show_count, show_secs
from weft.training.command import fail

EXAMPLES = """\
MODEL is a size (tiny, small, medium, gpt-125m, gpt-1.3b, gpt-7b, gpt-13b, gpt-70b), or a function of
yours, FILE.py:FUNCTION or module:FUNCTION, that gives (model, inputs, targets, loss).

examples:
  weft plan gpt-7b --ranks 64 --dtype bf16
  weft plan gpt-70b --ranks 512 --tp 8 --gpu-memory 141GB --bandwidth 50GB --ranks-per-host 8
  weft plan model.py:make --ranks 8 --strategy ddp fsdp --batch 64
  weft plan --calibrate && weft plan small --ranks 2 --profile
"""


def define_plan_command(parser: argparse.ArgumentParser) -> None:
    """Say what `weft plan` takes, and what runs it."""
    parser.description = "Say what each strategy would need for a model on many ranks: memory, traffic, time."
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a size, or a function of yours")
    job = parser.add_argument_group("the run")
    job.add_argument("--ranks", metavar="N", type=int, help="how many")
    job.add_argument("--strategy", metavar="S", nargs="+", help="only these (default: all)")
    job.add_argument("--batch", metavar="N", type=int, help="sequences a step, of all ranks together")
    job.add_argument("--batch-per-rank", metavar="N", type=int, help="the same for each rank (default: 1)")
    job.add_argument("--context", metavar="N", type=int, help="tokens of a sequence (default: the model's)")
    job.add_argument("--hook", metavar="H", default="none", help="what gradients travel as (default: none)")
    job.add_argument("--dtype", metavar="D", default="fp32", help="fp32 or bf16 (default: fp32)")
    job.add_argument("--tp", metavar="N", type=int, help="size of the tensor-parallel axis (default: 2)")
    job.add_argument("--shard", metavar="N", type=int, help="ranks that hsdp shards over (default: half)")
    machine = parser.add_argument_group("the machines")
    machine.add_argument("--gpu-memory", metavar="G", type=read_bytes, help="of a rank (default: 80GB)")
    machine.add_argument("--gpu-flops", metavar="F", type=read_count, help="a second (default: 400T)")
    machine.add_argument("--memory-bandwidth", metavar="B", type=read_bytes, help="(default: 2TB)")
    machine.add_argument(
        "--bandwidth", metavar="B", type=read_bytes, help="between hosts, of a rank (default: 50GB)"
    )
    machine.add_argument(
        "--local-bandwidth", metavar="B", type=read_bytes, help="within a host (default: 300GB)"
    )
    machine.add_argument("--ranks-per-host", metavar="N", type=int, help="(default: 8)")
    machine.add_argument("--latency", metavar="T", type=read_secs, help="between hosts (default: 10us)")
    measured = parser.add_argument_group("this machine")
    measured.add_argument("--calibrate", action="store_true", help="measure this machine, for --profile")
    measured.add_argument(
        "--profile", metavar="FILE", type=Path, nargs="?", const=Path(), help="take what was measured"
    )
    measured.add_argument("--backend", help="to measure (default: the one that weft train takes)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the plan here too")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        if arguments.calibrate:
            _calibrate(arguments)
        if arguments.model is not None:
            _plan(arguments)
        elif not arguments.calibrate:
            raise ConfigError("plan: which MODEL? `weft plan small --ranks 8`, say.")
    except WeftError as error:
        return fail("plan", error)
    return 0


def _calibrate(arguments: argparse.Namespace) -> None:
    path = _profile_path(arguments)
    machine = calibrate(arguments.backend)
    save_profile(machine, path)
    links = machine.links
    print(
        f"{machine.name}: {show_count(machine.flops_per_sec)} flops a second, "
        f"{show_bytes(machine.memory_bytes_per_sec)} a second of memory, {show_secs(machine.op_secs)} beside "
        f"each operation;\nbetween ranks {show_bytes(links.local.bytes_per_sec)} a second after "
        f"{show_secs(links.local.latency_secs)}, of which computing beside it pays {links.overlap_cost:.0%}."
        f"\nwritten to {path}"
    )


def _plan(arguments: argparse.Namespace) -> None:
    if arguments.ranks is None:
        raise ConfigError("plan: how many --ranks?")
    given = {name: value for name, value in vars(arguments).items() if name in PlanOptions.__annotations__}
    if arguments.strategy is not None:
        given["strategies"] = tuple(arguments.strategy)
    options = PlanOptions(**given)
    plans = plan(arguments.model, options, _read_machine(arguments))
    if arguments.json is not None:
        _write_json(plans, arguments.json)
    print(show_plans(plans))


def _read_machine(arguments: argparse.Namespace) -> Machine:
    machine = EIGHT_GPUS if arguments.profile is None else load_profile(_profile_path(arguments))
    links = machine.links
    between = {
        "bytes_per_sec": arguments.bandwidth,
        "latency_secs": arguments.latency,
    }
    local = {"bytes_per_sec": arguments.local_bandwidth}
    if arguments.ranks_per_host is not None and arguments.ranks_per_host < 1:
        raise ConfigError(f"plan: --ranks-per-host must be at least 1; got {arguments.ranks_per_host}.")
    links = _changed(
        links,
        between=_changed(links.between, **between),
        local=_changed(links.local, **local),
        ranks_per_host=arguments.ranks_per_host,
    )
    memory = arguments.gpu_memory
    return _changed(
        machine,
        links=links,
        memory_bytes=None if memory is None else int(memory),
        flops_per_sec=arguments.gpu_flops,
        memory_bytes_per_sec=arguments.memory_bandwidth,
    )


def _changed(one: Any, **values: Any) -> Any:
    """The same with the values that were given."""
    return replace(one, **{name: value for name, value in values.items() if value is not None})


def _profile_path(arguments: argparse.Namespace) -> Path:
    named: Path | None = arguments.profile
    return default_path() if named is None or named == Path() else named


def _write_json(plans: Sequence[StrategyPlan], path: Path) -> None:
    found = [{**asdict(plan), "fits": plan.fits, "tokens_per_sec": plan.tokens_per_sec} for plan in plans]
    try:
        path.write_text(json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"plan: {path} can't be written: {error.strerror or error}.") from None
