"""Make a local group, and register it with c10d as backend "weft".

Ranks find each other through c10d's store: each writes who it is, rank 0 makes the
board, and everyone looks whether all of them share a host, and how they may reach
each other's memory. What can't work is refused here, on every rank, with the reason.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import socket
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from weft.errors import ConfigError, PeerTimeoutError
from weft.local import kernel
from weft.local.board import Board
from weft.local.engine import Engine
from weft.local.group import LocalGroup
from weft.local.mailbox import mailbox_num_bytes
from weft.local.roster import Member, Roster
from weft.local.segment import Segment, SegmentName, open_segment, own_segment

BACKEND = "weft"
# Peers read it with a cross-memory copy, to see whether they may; threads of one
# process know each other by it.
_PROBE = ctypes.create_string_buffer(secrets.token_bytes(16), 16)


def register_backend() -> None:
    """Make `init_process_group("weft")` work. Harmless when called again."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, create_local_group, extended_api=True, devices=["cpu", "cuda"])


def create_local_group(options: Any, backend_options: object = None) -> LocalGroup:
    """What c10d calls on every rank to make a group.

    Raises ConfigError where the ranks don't share a host, PeerTimeoutError naming
    the ranks that don't come.
    """
    kernel.check_supported()
    timeout: timedelta = options.timeout
    store: Store = options.store
    rank, size = int(options.group_rank), int(options.group_size)
    global_ranks = list(options.global_ranks_in_group) or list(range(size))
    name = f"group '{options.group_id}' ({size} ranks)"
    introduction = _Introduction(store, rank, size, global_ranks, timeout)
    roster = Roster(rank, introduction.members())
    page = introduction.page(Board.num_bytes(size) + mailbox_num_bytes(size))
    if size > 1:
        roster.lock_own_byte(page.name)
    engine = Engine(page, roster, name, is_direct=introduction.agree_on_direct(roster))
    group = LocalGroup(engine, timeout)
    # A process that ends without destroying its group says so to those who wait for it.
    weakref.finalize(group, engine.close, "its process ended")
    return group


@dataclass(frozen=True, slots=True)
class _Introduction:
    """The ranks' first words to each other, through the store."""

    store: Store
    rank: int
    size: int
    global_ranks: Sequence[int]
    timeout: timedelta

    def members(self) -> list[Member]:
        """Tell the others who this rank is, hear who they are, and check that all share a host."""
        me = {
            "pid": os.getpid(),
            "host": _host(),
            "hostname": socket.gethostname(),
            "probe": _PROBE.raw.hex(),
            "address": ctypes.addressof(_PROBE),
        }
        self._say("member", me)
        told = self._hear("member")
        hosts = {entry["host"] for entry in told}
        if len(hosts) > 1:
            where = ", ".join(
                f"rank {rank} on {entry['hostname']}"
                for rank, entry in zip(self.global_ranks, told, strict=True)
            )
            raise ConfigError(
                f"backend 'weft' joins ranks of one host (and one container), and these are on {len(hosts)}: "
                f"{where}. Use backend 'gloo' or 'nccl' between hosts."
            )
        return [
            self._member(global_rank, entry)
            for global_rank, entry in zip(self.global_ranks, told, strict=True)
        ]

    def _member(self, global_rank: int, entry: dict[str, Any]) -> Member:
        member = Member(global_rank, entry["pid"])
        if entry["probe"] == _PROBE.raw.hex() and member.pid == os.getpid():
            return replace(member, can_be_read=True, is_thread_here=True)
        probe = bytes.fromhex(entry["probe"])
        return replace(member, can_be_read=kernel.can_reach(member.pid, entry["address"], probe))

    def page(self, num_bytes: int) -> Segment:
        """The board's shared page: made by rank 0, opened by the others."""
        if self.rank == 0:
            try:
                segment = own_segment(num_bytes, is_reclaimed=False)
            except ConfigError as error:
                self.store.set("page", json.dumps({"error": str(error)}))
                raise
            self.store.set("page", json.dumps({"name": tuple(segment.name)}))
            return segment
        self._wait(["page"])
        told = json.loads(self.store.get("page"))
        if "error" in told:
            raise ConfigError(f"rank {self.global_ranks[0]} could not make the group: {told['error']}")
        return open_segment(SegmentName(*told["name"]), self.global_ranks[0])

    def agree_on_direct(self, roster: Roster) -> bool:
        """Whether every rank may read every other's memory. WEFT_DIRECT_COPY=0 forbids it.

        Also a barrier: after it every rank has opened the page.
        """
        is_allowed = os.environ.get("WEFT_DIRECT_COPY", "1") != "0"
        self._say("direct", is_allowed and all(member.can_be_read for member in roster.members))
        return all(self._hear("direct"))

    def _say(self, topic: str, value: object) -> None:
        self.store.set(f"{topic}/{self.rank}", json.dumps(value))

    def _hear(self, topic: str) -> list[Any]:
        keys = [f"{topic}/{rank}" for rank in range(self.size)]
        self._wait(keys)
        return [json.loads(self.store.get(key)) for key in keys]

    def _wait(self, keys: list[str]) -> None:
        try:
            self.store.wait(keys, self.timeout)
        except (dist.DistStoreError, RuntimeError) as error:
            missing = [int(key.rsplit("/", 1)[-1]) if "/" in key else 0 for key in keys if not self._has(key)]
            ranks = [self.global_ranks[rank] for rank in missing]
            raise PeerTimeoutError(
                f"rank {self.global_ranks[self.rank]} waited {self.timeout.total_seconds():g} s for others "
                f"to join a group of {self.size} ranks. Not there: {ranks}. Check that these ranks were "
                "started and make the same groups in the same order.",
                ranks,
            ) from error

    def _has(self, key: str) -> bool:
        try:
            return self.store.check([key])
        except RuntimeError:
            return False


def _host() -> str:
    """This machine since its last boot, and the process namespace in it."""
    with open("/proc/sys/kernel/random/boot_id") as boot_id:
        return f"{boot_id.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"


# The one thing that happens when weft is imported: c10d learns the backend's name.
register_backend()
