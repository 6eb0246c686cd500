"""`run_on`: the mark by which a test says where its body runs; pytest collects it once for each place.

    @run_on(threads=(2, 4), weft=4, gloo=4)
    @pytest.mark.parametrize("numel", [1, 7])
    def test_sum(numel: int) -> None:
        ones = torch.ones(numel)
        dist.all_reduce(ones)
        assert ones.tolist() == [dist.get_world_size()] * numel

is test_sum[threads-2-1], test_sum[threads-4-1], test_sum[weft-4-1] and so on. The body runs on every rank,
with the arguments that pytest has for it. A test without the mark runs once, in the process of pytest; it may
start ranks itself.

Invariant: a rank-process imports the test's module by its name, as the process of pytest did, its asserts
rewritten. So functions and classes of a test module pickle as those of any module, and live as long as the
process. Ranks of `threads` share all of it with pytest.

This is a plugin of pytest, loaded by tests/conftest.py. Ranks themselves are the work of weft.launch and of
the pools of weft.testing, which live through the test run. Users have weft.testing.on_ranks.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import os
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What a place is called in a test's id -> the kind of its ranks, their backend, the marks that select it.
KINDS: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "threads": ("thread", None, ("threads",)),
    "gloo_threads": ("thread", "gloo", ("threads",)),
    "weft": ("process", "weft", ("processes",)),
    "gloo": ("process", "gloo", ("processes",)),
    "gpu": ("process", "weft", ("processes", "gpu")),
    "gpu_threads": ("thread", "weft", ("threads", "gpu")),
    "gpu_gloo": ("process", "gloo", ("processes", "gpu")),
    "nccl": ("process", "cpu:gloo,cuda:nccl", ("processes", "gpu", "nccl")),
}
# Of the whole body and of one collective: a hang ends soon. Ranks of nccl that share a GPU are slow.
LIMITS_SECS = {name: (30.0, 20.0) if name in ("weft", "gloo") else (30.0, 10.0) for name in KINDS}
LIMITS_SECS["nccl"] = (120.0, 40.0)


@dataclass(frozen=True)
class Place:
    """Where a body runs, and how long it and one of its collectives may take."""

    name: str
    ranks: int
    timeout: float
    collective_timeout: float

    @property
    def kind(self) -> str:
        return KINDS[self.name][0]

    @property
    def backend(self) -> str | None:
        # A single rank has no peers on the CPU to talk to.
        return "nccl" if (self.name, self.ranks) == ("nccl", 1) else KINDS[self.name][1]

    @property
    def marks(self) -> tuple[str, ...]:
        return KINDS[self.name][2]

    def __str__(self) -> str:
        return f"{self.name}-{self.ranks}"


def run_on(
    *,
    threads: int | Sequence[int] = (),
    gloo_threads: int | Sequence[int] = (),
    weft: int | Sequence[int] = (),
    gloo: int | Sequence[int] = (),
    gpu: int | Sequence[int] = (),
    gpu_threads: int | Sequence[int] = (),
    gpu_gloo: int | Sequence[int] = (),
    nccl: int | Sequence[int] = (),
    timeout: float | None = None,
    collective_timeout: float | None = None,
    full: bool = False,
    also: bool = False,
    **params: Sequence[Any],
) -> pytest.MarkDecorator:
    """Run the test on so many ranks at each of these places: 2, or (2, 4) for once on 2 and once on 4.

    `threads`: ranks are threads, on the local group; `gloo_threads` on gloo.
    `weft`, `gloo`: ranks are processes, on the local group or on gloo.
    `gpu`: processes that share a GPU, on the local group; `gpu_threads` and `gpu_gloo` likewise.
    `nccl`: processes on nccl; they share a GPU where there are not enough.
    `timeout`, `collective_timeout`: seconds, of the whole body and of one collective.
    `full`: run at these places in the full tier only.
    Further keywords are parameters of the test, with the values that they take at these places.

    Marks of a function add up. They replace those of its module (`pytestmark`), unless each says `also`:
    then they add to those. `run_on()` alone is for a test of one process in a file of others.
    """
    given = {
        "threads": threads,
        "gloo_threads": gloo_threads,
        "weft": weft,
        "gloo": gloo,
        "gpu": gpu,
        "gpu_threads": gpu_threads,
        "gpu_gloo": gpu_gloo,
        "nccl": nccl,
    }
    places: list[Place] = []
    for name, ranks in given.items():
        limits = LIMITS_SECS[name]
        for number in [ranks] if isinstance(ranks, int) else ranks:
            if number < 1:
                raise ValueError(f"run_on({name}={ranks}): a test needs one rank or more")
            places.append(Place(name, number, timeout or limits[0], collective_timeout or limits[1]))
    return pytest.mark.run_on(tuple(places), params, full, also)


def at_each_rank(context: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a fixture returns whose value is made by the ranks: each enters the context around the body."""
    return _AtEachRank(functools.partial(context, *args, **kwargs))


class SitOut(Exception):
    """Raised by such a context before it yields: this rank has no part in the body, and has done its own."""


@dataclass(frozen=True)
class _AtEachRank:
    enter: Callable[[], Any]


# -- collection -----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def collected_for(request: pytest.FixtureRequest) -> Place | None:
    """The place that a test is collected for; None for one without `run_on`."""
    return getattr(request, "param", None)


@pytest.hookimpl(tryfirst=True)  # the place comes first in a test's id
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = _find_marks(metafunc.definition)
    if not marks:
        return
    if metafunc.cls is not None:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: run_on is for functions, not for methods")
    names = tuple(marks[0].args[1])
    cases: list[Any] = []
    for places, params, is_full, _ in (mark.args for mark in marks):
        if set(params) != set(names):
            raise pytest.UsageError(
                f"{metafunc.definition.nodeid}: each run_on must give the same parameters, and they give "
                f"{sorted(names)} and {sorted(params)}"
            )
        for where, *values in itertools.product(places, *(params[name] for name in names)):
            marks_of_case = [*where.marks, *["full"] * is_full]
            cases.append(
                pytest.param(
                    where,
                    *values,
                    id="-".join([str(where), *map(_value_id, values)]),
                    marks=[getattr(pytest.mark, name) for name in marks_of_case],
                )
            )
    metafunc.parametrize(("collected_for", *names), cases, indirect=["collected_for"])


def _find_marks(definition: pytest.Item) -> list[pytest.Mark]:
    """The function's own marks, and those of its module where it has none or adds to them."""
    found: list[pytest.Mark] = []
    for node in reversed(definition.listchain()):
        marks = [mark for mark in node.own_markers if mark.name == "run_on"]
        found = [*marks, *found]
        if not all(mark.args[3] for mark in found):
            break
    return [mark for mark in found if mark.args[0]]


def _value_id(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value)


# -- running ----------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    __tracebackhide__ = True
    where: Any = pyfuncitem.funcargs.get("collected_for")
    if where is None:
        return None
    names = inspect.signature(pyfuncitem.function).parameters
    args = {name: pyfuncitem.funcargs[name] for name in names if name in pyfuncitem.funcargs}
    # Warnings are errors on rank-processes too; on a GPU where the test has filters of its own.
    is_filtered = "gpu" not in where.marks or pyfuncitem.get_closest_marker("filterwarnings") is not None
    _run(where, pyfuncitem.function, args, tuple(warnings.filters) if is_filtered else ())
    return True


def _run(where: Place, test: Callable[..., Any], args: Mapping[str, Any], filters: Sequence[Any]) -> None:
    __tracebackhide__ = True
    # Imported here: tests/repo and the pure tests should not pay for torch.
    import weft
    from weft.testing import shared_pool

    limits: dict[str, Any] = {"timeout": where.timeout, "collective_timeout": where.collective_timeout}
    try:
        if where.kind == "thread":
            reasons = weft.launch(
                _run_body,
                args=(test, args),
                ranks=where.ranks,
                kind="thread",
                backend=where.backend,
                **limits,
            )
        else:
            import cloudpickle

            # Apart from the call: the rank imports what it names after it has begun to rewrite asserts.
            call = cloudpickle.dumps((test.__module__, test.__name__, args))
            reasons = shared_pool(where.ranks).run(
                _run_in_process, args=(call, filters), backend=where.backend, **limits
            )
    except weft.LaunchError as error:
        # The ranks' tracebacks are in its message; the launcher's own would bury them.
        raise error.with_traceback(None) from error.__cause__
    for reason in reasons:
        if reason is not None:
            raise pytest.skip.Exception(reason, _use_item_location=True)


def _run_body(test: Callable[..., Any], args: Mapping[str, Any]) -> str | None:
    """Run the test on this rank. The reason is returned if it skips: that exception can't be pickled."""
    with ExitStack() as stack:
        try:
            entered = {
                name: stack.enter_context(value.enter()) if isinstance(value, _AtEachRank) else value
                for name, value in args.items()
            }
        except SitOut:
            return None
        try:
            test(**entered)
        except pytest.skip.Exception as skip:
            return str(skip)
    return None


def _run_in_process(call: bytes, filters: Sequence[Any]) -> str | None:
    from weft.testing.ranks import warnings_filtered

    _install_rewriting()
    with warnings_filtered(filters):
        module, name, args = pickle.loads(call)
        return _run_body(getattr(importlib.import_module(module), name), args)


@functools.cache
def _install_rewriting() -> None:
    """In a rank-process: import test modules as pytest does, so that a failed assert tells its values."""
    options = ("-c", os.devnull, "--rootdir", str(ROOT), "--noconftest", "--disable-plugin-autoload", "-s")
    pytest.Config.fromdictargs({}, list(options))  # installs the import hook
    _rewrite_asserts_beside_tests()


def _rewrite_asserts_beside_tests() -> None:
    """Let asserts tell their values also in the modules that lie beside tests: models, twins."""
    folders = (path.name for path in (ROOT / "tests").iterdir() if path.is_dir())
    pytest.register_assert_rewrite(*(f"tests.{name}" for name in folders if name[0] not in "_."))


# Before a conftest.py of a folder imports what lies beside its tests.
_rewrite_asserts_beside_tests()
