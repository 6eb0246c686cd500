"""launch(kind="process") and RankPool when all goes well."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from weft.errors import ConfigError, LaunchError, StateError
from weft.launcher import RankPool, child, init, launch
from weft.testing.pool import shared_pool

pytestmark = pytest.mark.processes

REPO = Path(__file__).parents[2]


def sum_of_ranks() -> float:
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor)
    return tensor.item()


def test_launch_returns_results_by_rank_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    offset = 100

    def body(scale):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
        environment = [os.environ[name] for name in names]
        return os.getpid(), offset + scale * dist.get_rank(), sum_of_ranks(), environment, init().rank

    results = launch(body, ranks=3, args=(10,), timeout=60)
    pids, values, sums, environments, ranks = zip(*results, strict=True)
    assert values == (100, 110, 120)
    assert sums == (3.0, 3.0, 3.0)
    assert ranks == (0, 1, 2)
    num_threads = str(max(1, len(os.sched_getaffinity(0)) // 3))
    assert environments[1] == ["1", "3", "1", "3", "127.0.0.1", num_threads]
    assert len({os.getpid(), *pids}) == 4
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


SCRIPT = """
import sys
import torch.distributed as dist
from weft.launcher import launch

print("main runs", flush=True)

class Point:
    def __init__(self, x):
        self.x = x

def gather(scale):
    points = [None] * dist.get_world_size()
    dist.all_gather_object(points, Point(scale * dist.get_rank()))
    return points[-1], sys.argv[1:]

outer = 7
results = launch(gather, ranks=2, args=(5,), timeout=60)
assert all(isinstance(point, Point) and point.x == 5 for point, _ in results), results
assert results[0][1] == ["--flag"], results
assert launch(lambda: outer + dist.get_rank(), ranks=2, kind="thread") == [7, 8]
print("done", flush=True)
"""


@pytest.mark.full
@pytest.mark.parametrize("way", ["file", "stdin"])
def test_script_without_main_guard_and_session_without_a_file(way: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py") if way == "file" else "-", "--flag"]
    finished = subprocess.run(
        command,
        input=SCRIPT if way == "stdin" else None,
        env=os.environ | {"PYTHONPATH": str(REPO / "src")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    said = finished.stderr.splitlines()
    assert all(line.startswith("weft: 2 ranks on backend 'weft': ") for line in said), finished.stderr
    assert len(said) == 2, "once for processes, once for threads"
    assert finished.stdout.splitlines() == ["main runs", "done"]


COMPILED_SCRIPT = """
import torch
from torch import nn
import weft

class Block(nn.Module):
    def forward(self, x):
        return torch.relu(x)  # a global of the script, in a function that Dynamo inlines into torch's

def job():
    model = torch.compile(nn.Sequential(Block()), backend="eager", fullgraph=True)
    return model(torch.tensor([-1.0, 1.0])).tolist()

print(weft.launch(job, ranks=1, timeout=100))
"""


def test_a_model_of_the_script_itself_is_compiled_on_process_ranks(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(COMPILED_SCRIPT)
    finished = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        env=os.environ | {"PYTHONPATH": str(REPO / "src")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "[[0.0, 1.0]]\n"


def test_pool_reuses_its_processes_and_each_job_starts_afresh() -> None:
    def body():
        # init_process_group wraps the hook, every time.
        wrapped = inspect.getclosurevars(sys.excepthook).nonlocals["old_hook"]
        return os.getpid(), torch.rand(1).item(), wrapped is sys.__excepthook__

    pool = shared_pool(2)
    first, second = pool.run(body), pool.run(body, backend="gloo")
    assert [result[0] for result in first] == pool.pids
    assert [result[2] for result in first] == [True, True]
    assert first == second
    assert shared_pool(2) is pool


@pytest.mark.full
def test_jobs_do_not_find_what_earlier_jobs_left_in_the_store() -> None:
    def body():
        store = distributed_c10d._get_default_store()
        dist.barrier()
        was_there = store.check(["left behind"])
        dist.barrier()
        store.set("left behind", "by this job")
        return was_there

    for _ in range(2):
        assert shared_pool(2).run(body, timeout=60) == [False, False]


def test_returned_ranks_wait_no_longer_than_their_peers_need() -> None:
    def body():
        child.LINGER_SECS = 3600.0

    try:
        assert shared_pool(2).run(body, timeout=60) == [None, None]
    finally:
        shared_pool(2).run(lambda: setattr(child, "LINGER_SECS", 1.0))


@pytest.mark.full
def test_jobs_see_the_callers_directory_path_and_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared_pool(2)  # runs before the path is what it will be
    (tmp_path / "weft_test_found.py").write_text("import os\ndef body():\n    return os.getcwd()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import weft_test_found  # pyright: ignore[reportMissingImports]

    assert shared_pool(2).run(weft_test_found.body) == [str(tmp_path)] * 2
    monkeypatch.undo()
    assert shared_pool(2).run(os.getcwd) == [os.getcwd()] * 2


def test_large_arguments_and_results_travel() -> None:
    sent = torch.arange(2_000_000, dtype=torch.float64)
    received = shared_pool(2).run(lambda tensor: tensor + dist.get_rank(), args=(sent,))
    assert torch.equal(received[0], sent)
    assert torch.equal(received[1], sent + 1)


def test_exit_zero_is_a_return_and_any_other_exit_a_failure() -> None:
    assert shared_pool(2).run(lambda: sys.exit(0)) == [None, None]
    with pytest.raises(LaunchError, match="raised SystemExit: 3"):
        shared_pool(2).run(lambda: sys.exit(3))


@pytest.mark.full
def test_function_may_destroy_its_world_and_make_another_from_the_environment() -> None:
    def body():
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        return sum_of_ranks()

    for _ in range(2):
        assert shared_pool(2).run(body) == [1.0, 1.0]


@pytest.mark.full
def test_ranks_that_return_at_different_times_do_not_disturb_each_other() -> None:
    def body():
        # Rank 1 answers only what rank 0 sent just before it returned.
        tensor = torch.full((1000,), 3.0)
        if dist.get_rank() == 0:
            dist.send(tensor, dst=1)
            return 3.0
        tensor.zero_()
        dist.recv(tensor, src=0)
        return tensor.mean().item()

    for backend in ("weft", "gloo"):
        assert shared_pool(2).run(body, backend=backend) == [3.0, 3.0]


@pytest.mark.full
def test_process_ranks_launch_thread_ranks() -> None:
    def body():
        inner = launch(sum_of_ranks, ranks=3, kind="thread")
        return dist.get_rank(), inner, sum_of_ranks()

    assert shared_pool(2).run(body) == [(0, [3.0] * 3, 1.0), (1, [3.0] * 3, 1.0)]


def test_results_that_cannot_be_pickled_are_named() -> None:
    with pytest.raises(LaunchError, match=r"rank \d returned a frame that can't be pickled"):
        shared_pool(2).run(lambda: sys._getframe())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "ranks must be an integer of at least 1; got 0"),
        ({"ranks": 2.0}, "ranks must be an integer"),
        ({"kind": "fiber"}, "kind must be 'process' or 'thread'; got 'fiber'"),
        ({"backend": "smoke"}, "'smoke', which c10d does not know"),
        ({"backend": "cpu:weft,cuda:smoke"}, "'smoke', which c10d does not know"),
        ({"timeout": -1.0}, r"timeout is in seconds and must be greater than 0 .*; got -1\.0"),
        ({"timeout": float("inf")}, r"launch: timeout is in seconds .* at most 1e\+09; got inf"),
        ({"timeout": float("nan")}, "launch: timeout is in seconds .*; got nan"),
        ({"timeout": "5"}, "launch: timeout is a number of seconds; got str '5'"),
        (
            {"collective_timeout": None},
            "launch: collective_timeout is a number of seconds; got NoneType None",
        ),
        ({"collective_timeout": 0}, "collective_timeout is in seconds"),
        ({"grace": 0}, "grace is in seconds"),
        ({"fn": "not a function"}, "fn must be callable"),
        ({"args": (sys._getframe(),)}, "can't be pickled"),
    ],
)
def test_bad_arguments_start_nothing(
    options: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("a process was started"))
    with pytest.raises(ConfigError, match=message):
        launch(**({"fn": sum_of_ranks} | options))


def test_unbuilt_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name != "nccl")
    with pytest.raises(ConfigError, match="'nccl', which this build of torch does not have"):
        launch(sum_of_ranks, backend="nccl")


@pytest.mark.parametrize(
    ("num_gpus", "kind", "message"),
    [(0, "process", "needs a GPU, and this process sees none"), (2, "thread", "Use kind='process'")],
)
def test_nccl_is_refused_where_it_cannot_work(
    num_gpus: int, kind: Literal["process", "thread"], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ConfigError, match=message):
        launch(sum_of_ranks, backend="cpu:gloo,cuda:nccl", kind=kind)


@pytest.mark.full
def test_closed_pool_says_so() -> None:
    with RankPool(1) as pool:
        assert pool.run(sum_of_ranks) == [0.0]
        (pid,) = pool.pids
    assert not pool.is_usable
    with pytest.raises(StateError, match="the pool is closed"):
        pool.run(sum_of_ranks)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    pool.close()
