"""Three processes for each library that has a distributed autograd: two trainers, and a worker with tables.

A team is started once and lives as long as the run. Its trainers wait at pipes for a block of calls, time
each of them and send the seconds back, so that whoever measures lets the teams take turns. The processes of
the others sleep meanwhile. Which cases there are, and what is asked of them, is dist_autograd.py's.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Candidate
from ranks import ONE_THREAD
from rpc_pairs import receive_block, time_block

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples import recommender

TABLES, TRAINERS = "tables", ("trainer1", "trainer2")
WORKERS = (*TRAINERS, TABLES)
NUM_LEARNING_STEPS, LEARNED_LOSS = 80, 0.5


class Work(Enum):
    """What one timed call does; `size` is the block's."""

    MATMUL = "multiply two matrices of `size` by `size` elsewhere, and get the gradients of both"
    RECOMMEND = "a step of examples/recommender.py, on both trainers"


class Mode(Enum):
    """How a backward finds out which gradients come."""

    FAST = "it takes all to come"
    EXACT = "it asks first"
    LOCAL = "there are no other workers"


@dataclass(frozen=True)
class Block:
    """Timed calls that trainers make back to back, after one that isn't timed."""

    work: Work
    size: int
    mode: Mode
    num_calls: int

    @property
    def num_trainers(self) -> int:
        return len(TRAINERS) if self.work is Work.RECOMMEND else 1


@dataclass(frozen=True)
class Library:
    """Where a library has torch's names, and the backend that its trainers reduce gradients with."""

    rpc: str
    dist_autograd: str
    names: dict[str, str]
    backend: str

    def load(self) -> Loaded:
        modules = {name: importlib.import_module(module) for name, module in self.names.items()}
        return Loaded(
            importlib.import_module(self.rpc),
            importlib.import_module(self.dist_autograd),
            {name: getattr(module, name) for name, module in modules.items()},
        )


@dataclass(frozen=True)
class Loaded:
    """The library in one of its processes."""

    rpc: Any
    dist_autograd: Any
    classes: dict[str, Any]

    def backward(self, context_id: int, loss: torch.Tensor, mode: Mode) -> None:
        exact = {"exact": True} if mode is Mode.EXACT else {}  # torch's has no such thing
        self.dist_autograd.backward(context_id, [loss], **exact)


# -- what trainers do --------------------------------------------------------------


def make_call(library: Loaded, work: Work, size: int, mode: Mode) -> Candidate:
    """A call to be timed. What it computes was checked."""
    return make_recommend(library, mode) if work is Work.RECOMMEND else make_matmul(library, size, mode)


def make_matmul(library: Loaded, size: int, mode: Mode) -> Candidate:
    x, y = (torch.randn(size, size, requires_grad=True) for _ in range(2))
    wanted = torch.autograd.grad((x @ y).sum(), (x, y))

    def multiply_elsewhere() -> Any:
        with library.dist_autograd.context() as context_id:
            product = library.rpc.rpc_sync(TABLES, torch.mm, (x, y))
            library.backward(context_id, product.sum(), mode)
            return library.dist_autograd.get_gradients(context_id)

    def multiply_here() -> Any:
        return dict(zip((x, y), torch.autograd.grad((x @ y).sum(), (x, y)), strict=True))

    call = multiply_here if mode is Mode.LOCAL else multiply_elsewhere
    seen = call()
    if not all(torch.allclose(seen[one], grad, rtol=1e-4) for one, grad in zip((x, y), wanted, strict=True)):
        raise RuntimeError(f"the gradients of a {size} x {size} product are wrong.")
    return call


def make_recommend(library: Loaded, mode: Mode) -> Candidate:
    """A step of the example. The same modules, optimizers and batches for every library."""
    rpc, classes = library.rpc, library.classes
    torch.manual_seed(0)
    tables = classes["RemoteModule"](f"{TABLES}/cpu", make_tables, (mode.name,))
    dense = classes["DistributedDataParallel"](recommender.make_dense())
    optimizers = [
        classes["DistributedOptimizer"](torch.optim.SparseAdam, tables.remote_parameters(), lr=0.03),
        classes["DistributedOptimizer"](torch.optim.Adam, [rpc.RRef(p) for p in dense.parameters()], lr=0.03),
    ]
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step() -> float:
        liked, shown, is_click = recommender.make_batch(generator)
        with library.dist_autograd.context() as context_id:
            logits = dense(tables.forward(liked, shown))
            loss = F.binary_cross_entropy_with_logits(logits, is_click)
            library.backward(context_id, loss, mode)
            for optimizer in optimizers:
                optimizer.step(context_id)
        return loss.item()

    losses = [step() for _ in range(NUM_LEARNING_STEPS)]
    if max(losses[-5:]) > LEARNED_LOSS:
        raise RuntimeError(f"the recommender doesn't learn: its losses were {losses}.")
    return step


_made: dict[str, recommender.Tables] = {}


def make_tables(key: str) -> recommender.Tables:
    """The tables that both trainers use. Runs on their worker; `prepare_tables` has made them."""
    return _made[key]


def prepare_tables() -> None:
    for mode in Mode:
        torch.manual_seed(0)
        _made[mode.name] = recommender.Tables()


# -- the processes -----------------------------------------------------------------


class Team:
    """A library's processes, seen from the one that measures."""

    def __init__(self, name: str, library: Library, folder: Path) -> None:
        self.name = name
        folder.mkdir()
        os.environ.update(ONE_THREAD)
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for worker in WORKERS:
            here, there = context.Pipe()
            run = run_tables if worker == TABLES else run_trainer
            # A daemon: it ends with this process, however that ends.
            process = context.Process(target=run, args=(library, worker, str(folder), there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def time_block(self, block: Block) -> list[float]:
        """The seconds of each call, on the trainer that was slower."""
        trainers = self._pipes[: block.num_trainers]
        for pipe in trainers:
            pipe.send(block)
        by_trainer = [self._receive(pipe) for pipe in trainers]
        return [max(seconds) for seconds in zip(*by_trainer, strict=True)]

    def _receive(self, pipe: Connection) -> list[float]:
        try:
            answer = pipe.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"a trainer of '{self.name}' died; see above.") from error
        if isinstance(answer, str):
            raise RuntimeError(f"'{self.name}' failed:\n{answer}")
        return answer

    def close(self) -> None:
        """End the processes, in good order where they still can."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=20)
            if process.exitcode is None:
                process.kill()
                process.join()


def join(library: Library, worker: str, folder: str) -> Loaded:
    """Be one of the workers, with the library's own defaults."""
    torch.set_num_threads(1)
    # It advises against classes that it has no scripted form of, in every process.
    logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)
    loaded = library.load()
    rank = WORKERS.index(worker)
    options = loaded.rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store")
    loaded.rpc.init_rpc(worker, rank=rank, world_size=len(WORKERS), rpc_backend_options=options)
    if worker in TRAINERS:
        store = dist.FileStore(f"{folder}/group", len(TRAINERS))
        dist.init_process_group(library.backend, store=store, rank=rank, world_size=len(TRAINERS))
    return loaded


def run_trainer(library: Library, worker: str, folder: str, pipe: Connection) -> None:
    """Be a trainer: time the blocks that come through the pipe until it is closed."""
    try:
        loaded = join(library, worker, folder)
        calls: dict[tuple[Work, int, Mode], Callable[[], object]] = {}
        while (block := receive_block(pipe)) is not None:
            key = (block.work, block.size, block.mode)
            if key not in calls:
                calls[key] = make_call(loaded, *key)
            pipe.send(time_block(calls[key], block.num_calls))
        calls.clear()
        loaded.rpc.shutdown()
        dist.destroy_process_group()
    except Exception:
        pipe.send(traceback.format_exc())


def run_tables(library: Library, worker: str, folder: str, pipe: Connection) -> None:
    """Be the worker with the tables, until the pipe is closed."""
    prepare_tables()
    loaded = join(library, worker, folder)
    receive_block(pipe)
    loaded.rpc.shutdown()
