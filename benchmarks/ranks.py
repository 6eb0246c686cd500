"""Start the ranks of a benchmark: under mpiexec where MPI is a candidate, else with weft.launch.

MPI's ranks have to be started by MPI. So that all candidates are measured in the same
processes, everything then runs in those: each joins a torch.distributed world too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

import weft

# Read when torch is loaded: a rank must find it in its environment.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

# What mpiexec's ranks run. They get this process's path, for the benchmark's own modules.
RANK_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from ranks import join_mpi_ranks
join_mpi_ranks(sys.argv[2])
"""


def find_mpiexec() -> str | None:
    """The mpiexec that belongs to mpi4py's MPI; None where either is missing."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    # A wheel's mpiexec lies beside Python; one of the system might start ranks of another MPI.
    return shutil.which("mpiexec", path=Path(sys.executable).parent) or shutil.which("mpiexec")


def run_ranks(fn: Callable[..., Any], num_ranks: int, *args: object, mpiexec: str | None) -> Any:
    """Run `fn(*args)` on each rank, with one thread a rank, and return what rank 0's returned.

    The default group is a local group (backend weft). Raises when a rank fails, after
    the ranks' own messages have been printed.
    """
    os.environ.update(ONE_THREAD)
    if mpiexec is None:
        return weft.launch(_with_one_thread, ranks=num_ranks, args=(fn, args))[0]
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        Path(folder, "call").write_bytes(cloudpickle.dumps((fn, args)))
        # -m mpi4py: a rank that raises ends the others, where it would leave them waiting.
        program = [sys.executable, "-m", "mpi4py", "-c", RANK_PROGRAM, json.dumps(sys.path), folder]
        done = subprocess.run([mpiexec, "-n", str(num_ranks), *program], check=False)
        if done.returncode != 0:
            raise RuntimeError(
                f"a rank failed under mpiexec, which exited with {done.returncode}; see its traceback above."
            )
        return pickle.loads(Path(folder, "result").read_bytes())


def _with_one_thread(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    return fn(*args)


def join_mpi_ranks(folder: str) -> None:
    """Be one of mpiexec's ranks: read the call, make it, and let rank 0 write the result."""
    import mpi4py  # pyright: ignore[reportMissingImports] - of the extra `bench`

    mpi4py.rc.thread_level = "funneled"  # spares MPI the locks that it would take in every call
    from mpi4py import MPI  # pyright: ignore[reportMissingImports]

    rank, num_ranks = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("weft", store=store, rank=rank, world_size=num_ranks)
    fn, args = pickle.loads(Path(folder, "call").read_bytes())
    result = _with_one_thread(fn, args)
    if rank == 0:
        Path(folder, "result").write_bytes(cloudpickle.dumps(result))
    dist.destroy_process_group()
