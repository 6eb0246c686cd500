"""`weft plan --calibrate`: measure this machine on two ranks, and make a Machine of it."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence

from weft.launcher import launch
from weft.launcher.backends import choose_local_engine
from weft.planning.anchors import NUM_RANKS, fit, measure_steps
from weft.planning.machine import Curve, Link, Links, Machine
from weft.planning.measure import Measurements, measure_rank


def calibrate(backend: str | None = None, num_threads: int | None = None) -> Machine:
    """Measure this machine on two ranks of `backend`, by default the one that `weft train` takes.

    `num_threads` are those of each rank; the cores are shared out unless it is given. It takes about a
    minute, during which the machine should do nothing else.
    """
    if num_threads is None:
        num_threads = max(1, (os.cpu_count() or 1) // NUM_RANKS)
    found = launch(measure_rank, ranks=NUM_RANKS, backend=backend, args=(num_threads,))
    engine = backend or choose_local_engine(NUM_RANKS).backend
    machine = as_machine(found, reads_peers=engine == "weft")
    steps = launch(measure_steps, ranks=NUM_RANKS, backend=backend, args=(num_threads,))
    return fit(machine, [statistics.mean(secs) for secs in zip(*steps, strict=True)])


def as_machine(found: Sequence[Measurements], *, reads_peers: bool) -> Machine:
    """The machine that the ranks have measured."""
    ops = _mean_curves([one.ops for one in found])
    messages = _mean_curves([one.messages for one in found])
    size, secs = ops["aten::mm"].points[-1] if "aten::mm" in ops else (1e9, 0.1)
    copied, copy_secs = ops["aten::add"].points[-1] if "aten::add" in ops else (1e9, 0.5)
    sent, send_secs = messages["all_gather"].points[-1]
    op_secs = statistics.mean(one.op_secs for one in found)
    link = Link(sent / 2 / send_secs, messages["control"].points[0][1])
    links = Links(
        local=link,
        between=link,
        ranks_per_host=1 << 30,  # all ranks are taken to be here
        curves=messages,
        reads_peers=reads_peers,
        overlap_cost=statistics.mean(one.overlap_cost for one in found),
    )
    return Machine(
        name=f"{platform.machine()} of {os.cpu_count()} cores, measured",
        device="cpu",
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // NUM_RANKS,
        flops_per_sec=size / secs,
        memory_bytes_per_sec=copied / copy_secs,
        op_secs=op_secs,
        view_secs=op_secs,
        dtensor_secs=statistics.mean(one.dtensor_secs for one in found),
        links=links,
        curves=ops,
    )


def _mean_curves(found: Sequence[dict[str, Curve]]) -> dict[str, Curve]:
    """The mean of the ranks' times at each size that all of them have seen."""
    means: dict[str, Curve] = {}
    for name in found[0]:
        by_rank = [dict(curves[name].points) for curves in found if name in curves]
        sizes = sorted(set.intersection(*(set(points) for points in by_rank)))
        means[name] = Curve(
            tuple((size, statistics.mean(points[size] for points in by_rank)) for size in sizes)
        )
    return means
