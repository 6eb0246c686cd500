"""How workers find each other: in a store, where each leaves its card.

A static group is complete when every one of `world_size` workers has left its card: only then does anyone
return from init_rpc. A dynamic group has a list of members that workers join and leave at will; a worker that
is called by a name nobody knows yet is looked up there.

The store is not trusted. Cards are plain data, and whoever writes a false one still lacks the secret.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from weft.errors import ConfigError, PeerError, PeerTimeoutError, StateError, UnfitError
from weft.rpc.agent import Agent
from weft.rpc.devices import WorkerDevices, check_device_maps
from weft.rpc.directory import device_map_of
from weft.rpc.options import AgentOptions
from weft.rpc.secret import make_secret, read_secret_file, write_secret_file
from weft.rpc.workers import (
    Card,
    WorkerInfo,
    check_distinct,
    check_name,
    is_listening,
    own_address,
    this_host,
)

Store = Any  # torch.distributed.Store, which is not declared as exported
_LONGEST_WAIT_SECS = 24 * 3600.0
_SAME_SECRET = "All workers must have the same secret (WEFT_RPC_SECRET, or the option secret=)."
_SECRET_KEY = "secret"  # among the members of a dynamic group, whose other keys are ids
_WILDCARDS = ("0.0.0.0", "::", "*")


class Meeting:
    """A group's corner of the store."""

    def __init__(self, store: Store, timeout_secs: float, *, is_static: bool, rank: int) -> None:
        self._timeout = timedelta(seconds=timeout_secs or _LONGEST_WAIT_SECS)
        corner = dist.PrefixStore("weft_rpc", store)  # pyright: ignore[reportPrivateImportUsage]
        corner.set_timeout(self._timeout)
        kind = "static" if is_static else "dynamic"
        if _agree(corner, "kind", kind) != kind:
            raise UnfitError(
                "RPC group mixes statically and dynamically initialized members which is not supported. "
                "Give every worker the same world_size, or none of them."
            )
        # Workers that meet at this store for the n-th time meet the others' n-th time.
        turn = corner.add(f"turn/{rank}", 1) if is_static else 0
        self._corner: Store = dist.PrefixStore(str(turn), corner)  # pyright: ignore[reportPrivateImportUsage]
        self._corner.set_timeout(self._timeout)
        self.epoch = int(_agree(self._corner, "epoch", str(secrets.randbits(63))))
        self._secret_file: str | None = None

    # The secret

    def share_secret(self, rank: int) -> bytes:
        """The secret of a static group on one host that was given none. Rank 0 makes it."""
        if rank == 0:
            secret = make_secret()
            self._secret_file = write_secret_file(secret)
            self._corner.set("secret", self._secret_file)
            return secret
        return read_secret_file(self._wait_for("secret", "the first worker (rank 0)").decode())

    def find_secret(self) -> bytes:
        """The same for a dynamic group: whoever finds none makes it. The last one to leave removes it."""
        while True:
            before = _agree(self._corner, "members", "{}")
            members = json.loads(before)
            if _SECRET_KEY in members:
                try:
                    return read_secret_file(members[_SECRET_KEY])
                except ConfigError:
                    if any(is_listening(card) for card in _cards(members)):
                        raise
            secret = make_secret()
            self._secret_file = write_secret_file(secret)
            if self._replace(before, {**members, _SECRET_KEY: self._secret_file}):
                return secret
            self.remove_secret()

    def remove_secret(self) -> None:
        """Remove the file with the secret, once everyone has read it."""
        if self._secret_file is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._secret_file)
            self._secret_file = None

    # Cards

    def publish(self, card: Card) -> None:
        """Leave this worker's card."""
        self._corner.set(f"card/{card.id}", card.encode())

    def read_all(self, world_size: int) -> list[Card]:
        """The cards of every worker of a static group; waits for those that are not there yet."""
        return [
            Card.decode(self._wait_for(f"card/{rank}", f"rank {rank} of {world_size}"))
            for rank in range(world_size)
        ]

    def report(self, rank: int, problem: str) -> None:
        """Say whether this worker can talk to the first; what is wrong, or nothing."""
        self._corner.set(f"report/{rank}", problem or "-")

    def read_reports(self, rank: int, world_size: int) -> str:
        """What is wrong with the workers of a static group, once all have said. The first one gathers it."""
        if rank == 0:
            reports = [self._wait_for(f"report/{other}", f"rank {other}") for other in range(1, world_size)]
            problems = " ".join(report.decode() for report in reports if report != b"-")
            self._corner.set("verdict", problems or "-")
        verdict = self._wait_for("verdict", "the first worker (rank 0)").decode()
        return "" if verdict == "-" else verdict

    def _wait_for(self, key: str, who: str) -> bytes:
        try:
            return self._corner.get(key)
        except RuntimeError as error:  # DistStoreError; of a file store a plain one
            raise PeerTimeoutError(
                f"init_rpc: {who} did not come within {self._timeout.total_seconds():g} seconds "
                "(rpc_timeout). Every worker must call init_rpc with the same world_size and init_method."
            ) from error

    # Members of a dynamic group

    def members(self) -> list[Card]:
        """The cards of those who are there."""
        return _cards(json.loads(_agree(self._corner, "members", "{}")))

    def join(self, card: Card) -> list[Card]:
        """Join the members; those who were there before."""

        def add(members: dict[str, str]) -> dict[str, str]:
            rivals = [other for other in _cards(members) if other.id == card.id or other.name == card.name]
            # One that died could not leave: nobody listens where it did.
            alive = [other for other in rivals if is_listening(other)]
            check_distinct([*alive, card])
            if alive:
                raise UnfitError(
                    f"init_rpc: rank {card.id} is not unique: another worker of that rank is there."
                )
            gone = {str(other.id) for other in rivals}
            members = {key: text for key, text in members.items() if key not in gone}
            return {**members, str(card.id): card.encode().decode()}

        return _cards(self._change_members(add))

    def leave(self, worker_id: int) -> None:
        """Leave the members."""

        def remove(members: dict[str, str]) -> dict[str, str]:
            left = {key: text for key, text in members.items() if key != str(worker_id)}
            return left if _cards(left) else {}

        before = self._change_members(remove)
        if _SECRET_KEY in before and not _cards(remove(before)):
            self._secret_file = before[_SECRET_KEY]
            with suppress(ConfigError):
                read_secret_file(self._secret_file)  # it is one of ours, whatever the store says
                self.remove_secret()

    def _change_members(self, change: Callable[[dict[str, str]], dict[str, str]]) -> dict[str, str]:
        """Change the members as nobody else does at the same time; what they were before."""
        while True:
            before = _agree(self._corner, "members", "{}")
            if self._replace(before, change(json.loads(before))):
                return json.loads(before)

    def _replace(self, before: str, members: dict[str, str]) -> bool:
        after = json.dumps(members)
        return before == after or _text(self._corner.compare_set("members", before, after)) == after


def _cards(members: dict[str, str]) -> list[Card]:
    return [Card.decode(text.encode()) for key, text in members.items() if key != _SECRET_KEY]


def _agree(store: Store, key: str, proposal: str) -> str:
    """The value that was proposed first for a key."""
    return _text(store.compare_set(key, "", proposal))


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode()


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
        look_up = None if world_size else lambda key: _find_member(meeting, key)
        agent = Agent(WorkerInfo(name, rank), meeting.epoch, secret, options, look_up)
        card = _make_card(agent, options)
        agent.directory.add(card).is_linked = True  # to itself
        if world_size:
            meeting.publish(card)
            cards = meeting.read_all(world_size)
            check_distinct(cards)
            meeting.remove_secret()
        else:
            cards = [*meeting.join(card), card]
            agent.leave_group = lambda: meeting.leave(rank)
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
        if world_size:
            meeting.remove_secret()
        raise


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
            f"init_rpc: not all workers can talk to each other. {problems} {_SAME_SECRET}",
            [agent.info.id],
        )


def _check_entry(agent: Agent) -> None:
    """Raise when none of those who are in a dynamic group lets this worker in."""
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
        raise PeerError(f"init_rpc: {problem} {_SAME_SECRET}", problem.ranks) from problem


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
