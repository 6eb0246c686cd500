"""Agreement on an engine among ranks that find each other by environment variables.

Ranks may see different things: a host without GPUs, a batch system that shows each rank only its own GPU, a
container that forbids the local group. So each rank publishes its facts in the store, rank 0 publishes a
summary, and all decide by that.

Two values per rank pass through the store, for any number of ranks. They are sealed where the ranks have a
secret. Facts contain a nonce, and the summary repeats the nonces of all ranks: replayed facts fit no summary,
and a replayed summary fits no rank.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import ConfigError, PeerTimeoutError, TamperedError
from weft.launcher.backends import EngineFacts
from weft.launcher.stores import Store
from weft.local.kernel import find_obstacle, host_identity
from weft.trust import SECRET_KEY, JobSecret, SealedStore, check_integer

_SUMMARY_KEY = "summary"
_MAX_CHARS = 4096
_NUMBER_CHARS = 16


@dataclass(frozen=True)
class RankVariables:
    """The rank that environment variables give to this process."""

    rank: int
    size: int
    local_rank: int
    local_size: int


@dataclass(frozen=True)
class _RankFacts:
    """What one rank sees."""

    host: str
    asked: str  # for which backend, in words
    gpu: str | None  # its UUID
    obstacle: str | None  # why the local group can't run
    has_nccl: bool
    number: str  # a nonce, drawn for this meeting


@dataclass(frozen=True)
class _Summary:
    """Rank 0's summary of all ranks' facts."""

    num_gpus: int
    is_one_host: bool
    has_nccl: bool
    obstacle: str | None
    shared_gpus: list[str]
    numbers: list[str]  # nonces, by rank
    problem: str | None = None  # ranks ask for different backends
    refusal: str | None = None  # a value in the store that its rank did not write


def agree_on_facts(
    store: Store,
    variables: RankVariables,
    asked: str | None,
    secret: JobSecret | None = None,
    *,
    group: str = "init",
) -> tuple[EngineFacts, bool]:
    """What the choice of an engine depends on, the same on every rank, and whether this rank's GPU is shared.

    `asked` is the backend that the program asks for. Raises ConfigError, on every rank, where ranks ask for
    different ones; PeerTimeoutError, naming the ranks that don't come; TamperedError for values that the
    ranks did not write.
    """
    rank, size = variables.rank, variables.size
    sealed = SealedStore(store, secret, group=group, rank=rank)
    mine = _RankFacts(
        host=host_identity(),
        asked="the default backend" if asked is None else f"backend {asked!r}",
        gpu=_gpu_of(variables.local_rank),
        obstacle=find_obstacle(),
        has_nccl=dist.is_nccl_available(),
        number=secrets.token_hex(_NUMBER_CHARS // 2),
    )
    sealed.set(_key_of(rank), json.dumps(asdict(mine)))
    if rank == 0:
        summary = _collect(sealed, variables, mine)
        sealed.set(_SUMMARY_KEY, json.dumps(asdict(summary)))
    else:
        _wait(store, [_SUMMARY_KEY], variables)
        summary = _read_summary(sealed.get_json(_SUMMARY_KEY, 0), size)
    if summary.refusal is not None:
        raise TamperedError(f"init: {summary.refusal}")
    if summary.problem is not None:
        raise ConfigError(f"init: {summary.problem}")
    if summary.numbers[rank] != mine.number:
        raise _refusal(rank, "rank 0's summary has other facts of this rank than it wrote")
    facts = EngineFacts(
        size,
        num_gpus=summary.num_gpus,
        is_one_host=summary.is_one_host,
        has_nccl=summary.has_nccl,
        obstacle=summary.obstacle,
    )
    return facts, mine.gpu in summary.shared_gpus


def wait_for_first(store: Store, variables: RankVariables) -> None:
    """Wait until rank 0 has published where the job's secret is; no other rank publishes anything before."""
    try:
        store.wait([SECRET_KEY])
    except dist.DistStoreError:
        raise _absence([0], variables) from None


def withdraw(store: Store, variables: RankVariables) -> None:
    """Leave an unsealed value in this rank's place: rank 0 refuses it at once, without waiting in vain."""
    store.set(_key_of(variables.rank), "")


def device_of(local_rank: int) -> torch.device:
    """Where a rank's tensors belong: a GPU of this host, shared out by `local_rank`, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _gpu_of(local_rank: int) -> str | None:
    """The UUID of a rank's GPU; None without CUDA."""
    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(device_of(local_rank)).uuid)


def _key_of(rank: int) -> str:
    return f"facts/{rank}"


def _collect(sealed: SealedStore, variables: RankVariables, mine: _RankFacts) -> _Summary:
    """Rank 0's part: wait for all ranks' facts and summarise them."""
    _wait(sealed.store, [_key_of(rank) for rank in range(variables.size)], variables)
    try:
        others = [
            _read_facts(sealed.get_json(_key_of(rank), rank), rank) for rank in range(1, variables.size)
        ]
    except TamperedError as error:  # the others wait for a summary
        return _Summary(0, False, False, None, [], [""] * variables.size, refusal=str(error)[:_MAX_CHARS])
    return _sum_up([mine, *others])


def _sum_up(facts: Sequence[_RankFacts]) -> _Summary:
    gpus = Counter(each.gpu for each in facts if each.gpu is not None)
    other = next((rank for rank, each in enumerate(facts) if each.asked != facts[0].asked), None)
    problem = None
    if other is not None:
        problem = (
            f"rank 0 asks for {facts[0].asked}, and rank {other} for {facts[other].asked}. Ask for the same "
            "on every rank, or leave the backend out everywhere."
        )
    return _Summary(
        num_gpus=len(gpus),
        is_one_host=len({each.host for each in facts}) == 1,
        has_nccl=all(each.has_nccl for each in facts),
        obstacle=next((each.obstacle for each in facts if each.obstacle is not None), None),
        shared_gpus=sorted(gpu for gpu, count in gpus.items() if count > 1),
        numbers=[each.number for each in facts],
        problem=problem,
    )


def _wait(store: Any, keys: list[str], variables: RankVariables) -> None:
    try:
        store.wait(keys)
    except dist.DistStoreError:
        missing = [rank for rank in range(variables.size) if not store.check([_key_of(rank)])]
        raise _absence(
            missing or [0], variables
        ) from None  # all facts are there: rank 0 has published no summary


def _absence(missing: Sequence[int], variables: RankVariables) -> PeerTimeoutError:
    return PeerTimeoutError(
        f"init: rank {variables.rank} timed out waiting for the other ranks to call init. Not there: "
        f"{missing} of {variables.size}. Look at their output.",
        missing,
    )


def _read_facts(value: Any, rank: int) -> _RankFacts:
    fields = _fields_of(value, ("host", "asked", "gpu", "obstacle", "has_nccl", "number"), rank)
    host, asked, gpu, obstacle, has_nccl, number = fields
    return _RankFacts(
        host=_check_text(host, rank),
        asked=_check_text(asked, rank),
        gpu=None if gpu is None else _check_text(gpu, rank),
        obstacle=None if obstacle is None else _check_text(obstacle, rank),
        has_nccl=_check_bool(has_nccl, rank),
        number=_check_text(number, rank, _NUMBER_CHARS),
    )


def _read_summary(value: Any, size: int) -> _Summary:
    names = (
        "num_gpus",
        "is_one_host",
        "has_nccl",
        "obstacle",
        "shared_gpus",
        "numbers",
        "problem",
        "refusal",
    )
    num_gpus, is_one_host, has_nccl, obstacle, shared, numbers, problem, refusal = _fields_of(value, names, 0)
    for texts, most in ((shared, size), (numbers, size)):
        if type(texts) is not list or len(texts) > most:
            raise _refusal(0, f"a field is not a list of at most {most} items")
    if len(numbers) != size:
        raise _refusal(0, f"it has {len(numbers)} ranks, not {size}")
    return _Summary(
        num_gpus=check_integer(num_gpus, "the number of GPUs in rank 0's summary", 0, size),
        is_one_host=_check_bool(is_one_host, 0),
        has_nccl=_check_bool(has_nccl, 0),
        obstacle=None if obstacle is None else _check_text(obstacle, 0),
        shared_gpus=[_check_text(gpu, 0) for gpu in shared],
        numbers=[_check_text(number, 0, _NUMBER_CHARS) for number in numbers],
        problem=None if problem is None else _check_text(problem, 0, 3 * _MAX_CHARS),
        refusal=None if refusal is None else _check_text(refusal, 0),
    )


def _fields_of(value: Any, names: Sequence[str], rank: int) -> list[Any]:
    if type(value) is not dict or not all(name in value for name in names):
        raise _refusal(rank, "it is not a JSON object with the fields that a rank writes")
    return [value[name] for name in names]


def _check_text(value: Any, rank: int, max_chars: int = _MAX_CHARS) -> str:
    if type(value) is not str or len(value) > max_chars:
        raise _refusal(rank, f"a field is not a text of at most {max_chars} characters")
    return value


def _check_bool(value: Any, rank: int) -> bool:
    if type(value) is not bool:
        raise _refusal(rank, "a flag is neither true nor false")
    return value


def _refusal(rank: int, problem: str) -> TamperedError:
    return TamperedError(
        f"init: the entry of rank {rank} in the store was refused: {problem}. Either another program writes "
        "to this store: find out who reaches its port. Or the ranks run different versions of weft."
    )
