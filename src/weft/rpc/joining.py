"""How workers find each other: in a store, where each leaves its card.

A static group is complete when every one of `world_size` workers has left its card: only then does anyone
return from init_rpc. A dynamic group has a list of members that workers join and leave at will; a worker that
is called by a name nobody knows yet is looked up there. The entries in the store are meeting.py's.
"""

from __future__ import annotations

import logging
import os
import threading
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from weft.errors import (
    ConfigError,
    PeerError,
    StateError,
)
from weft.rpc.agent import Agent
from weft.rpc.devices import WorkerDevices, check_device_maps
from weft.rpc.directory import device_map_of
from weft.rpc.meeting import SAME_SECRET, Meeting, Store
from weft.rpc.options import AgentOptions
from weft.rpc.workers import (
    Card,
    WorkerInfo,
    check_distinct,
    check_name,
    is_listening,
    own_address,
    this_host,
)

logger = logging.getLogger(__name__)
_WILDCARDS = ("0.0.0.0", "::", "*")


def join_group(store: Store, name: str, rank: int, world_size: int | None, options: AgentOptions) -> Agent:
    """Make this worker's agent and bring it together with the others'. A failure leaves nothing behind."""
    check_name(name)
    if world_size and not 0 <= rank < world_size:
        raise ConfigError(f"init_rpc: rank {rank} does not fit world_size {world_size}: it counts from 0.")
    if options.listen is not None and options.secret is None:
        raise ConfigError(
            f"init_rpc: listen={options.listen!r} lets other hosts connect, so a secret is needed that only "
            "your workers know. Set WEFT_RPC_SECRET to the same random text for all of them, or the option "
            "secret=."
        )
    meeting = Meeting(store, options.timeout_secs, is_static=bool(world_size), rank=rank)
    agent: Agent | None = None
    try:
        secret = options.secret
        if secret is None:
            secret = meeting.share_secret(rank) if world_size else meeting.find_secret()
        meeting.seal_with(secret)
        look_up = None if world_size else lambda key: _find_member(meeting, key)
        agent = Agent(WorkerInfo(name, rank), meeting.epoch, secret, options, look_up)
        card = _make_card(agent, options)
        agent.directory.add(card).is_linked = True  # to itself
        if world_size:
            meeting.publish(card)
            cards = meeting.read_all(world_size)
            check_distinct(cards)
        else:
            cards = [*meeting.join(card), card]
            agent.leave_group = lambda secs: _leave_within(meeting, rank, secs)
            agent.list_members = meeting.members
        _check_devices(cards, is_static=bool(world_size))
        for other in cards:
            agent.directory.add(other)
        if world_size:
            _check_links(agent, meeting, world_size)
        else:
            _check_entry(agent)
        # Calls that came before are heard now: who runs one must know everybody.
        agent.start()
        return agent
    except BaseException:
        if agent is not None:
            agent.end()
        raise


def _leave_within(meeting: Meeting, rank: int, secs: float) -> bool:
    """Leave a dynamic group; False when its store does not answer for so long."""

    def leave() -> None:
        try:
            meeting.leave(rank)
        except Exception:
            logger.debug("the group's store is gone", exc_info=True)

    # A store whose host is stopped answers nobody, and can't be asked with a timeout.
    leaving = threading.Thread(target=leave, name="weft-rpc-leave", daemon=True)
    leaving.start()
    leaving.join(secs)
    return not leaving.is_alive()


def _check_links(agent: Agent, meeting: Meeting, world_size: int) -> None:
    """Raise on every worker when one of them can't reach the first: another secret, another network."""
    if agent.info.id != 0:
        problem = ""
        try:
            agent.reach(agent.peers[0])
        except PeerError as error:
            problem = f"worker '{agent.info.name}' (id {agent.info.id}): {error}"
        meeting.report(agent.info.id, problem)
    problems = meeting.read_reports(agent.info.id, world_size)
    if problems:
        raise PeerError(
            f"init_rpc: not all workers can talk to each other. {problems} {SAME_SECRET}",
            [agent.info.id],
        )


def _check_entry(agent: Agent) -> None:
    """Raise when no member of a dynamic group accepts this worker's connection."""
    others = [peer for peer in agent.peers.values() if peer.info != agent.info and is_listening(peer.card)]
    problem: PeerError | None = None
    for other in others:
        try:
            agent.reach(other)
        except PeerError as error:
            problem = error if is_listening(other.card) else problem  # it may have left meanwhile
        else:
            return
    if problem is not None:
        raise PeerError(f"init_rpc: {problem} {SAME_SECRET}", problem.ranks) from problem


def _find_member(meeting: Meeting, key: str | int) -> Card | None:
    try:
        members = meeting.members()
    except dist.DistError:
        return None  # the store went with its host: what is known has to do
    matching = [card for card in members if key in (card.name, card.id)]
    return matching[0] if matching else None


def _make_card(agent: Agent, options: AgentOptions) -> Card:
    return Card(
        name=agent.info.name,
        id=agent.info.id,
        host=this_host(),
        pid=os.getpid(),
        local_address=agent.links.local_address,
        remote_address=_reachable(agent.links.remote_address),
        bell=list(agent.links.bell.name),
        takes_memory=options.allow is None,
        num_devices=torch.cuda.device_count(),
        devices=[str(device) for device in options.devices],
        device_maps={
            callee: {str(source): str(target) for source, target in device_map.items()}
            for callee, device_map in options.device_maps.items()
        },
    )


def _reachable(address: str | None) -> str | None:
    """An address that others can use: where a worker listens everywhere, that of its host."""
    if address is None:
        return None
    parsed = urlparse(address)
    if parsed.hostname not in _WILDCARDS:
        return address
    return f"tcp://{own_address(os.environ.get('MASTER_ADDR'))}:{parsed.port}"


def _check_devices(cards: list[Card], *, is_static: bool) -> None:
    if not any(card.device_maps or card.devices for card in cards):
        return
    check_device_maps(
        {
            card.name: WorkerDevices(
                card.num_devices,
                [torch.device(device) for device in card.devices],
                {callee: device_map_of(card, callee) for callee in card.device_maps},
            )
            for card in cards
        },
        is_static=is_static,
    )


def open_store(init_method: str, rank: int, world_size: int | None) -> tuple[Store, int, int | None]:
    """The store that `init_method` names, and this worker's rank and world size, filled in where they are
    known.
    """
    if init_method == "env://":
        is_left_out = rank == -1 and world_size is None
        if dist.is_initialized():
            known = dist.get_rank(), dist.get_world_size()
            if is_left_out or known == (rank, world_size):
                store: Store = dist.distributed_c10d._get_default_store()
                return store, *known
        if is_left_out and "WORLD_SIZE" in os.environ and "RANK" in os.environ:
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size is None and rank != -1 and init_method != "env://":
        # The only form in which torch's handlers take a group that has no size.
        init_method += f"{'&' if '?' in init_method else '?'}rank={rank}&world_size=-1"
        meeting = rendezvous(init_method)
    else:
        meeting = rendezvous(init_method, rank=rank, world_size=world_size or -1)
    store, rank, _ = next(meeting)
    if rank < 0:
        raise StateError("init_rpc: the rank of this worker is not known. Give rank=.")
    return store, rank, world_size
