"""Rendezvous of a local group's ranks through c10d's store.

Each rank publishes its process, rank 0 makes the board's page and publishes its name, and
all check that they share a host, and how they may reach each other's memory.

The store is not trusted: any client that reaches its port can write to it. So a group of
more than one rank always has a secret (weft.trust), and every value is sealed with it:

1. `member`: each rank's process, and a nonce of this meeting;
2. `page`, `direct`: sealed together with a digest of all values of 1. A value of an earlier
   meeting can be replayed in 1, but then no rank's value of 2 verifies.

Invariant: a value's seal, types and bounds are checked before anything is opened, read or
written by it, and no memory is mapped but the page that rank 0 published in this meeting.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from weft.errors import ConfigError, PeerTimeoutError, TamperedError
from weft.local import kernel
from weft.local.roster import Member, Roster
from weft.local.segment import Segment, open_segment, own_segment, read_segment_name, whole_pages
from weft.trust import (
    MAX_PID,
    SECRET_KEY,
    SealedStore,
    address_of,
    check_integer,
    check_process,
    next_turn,
    share_secret,
)

_PROBE_BYTES = 16
# Peers read it with a cross-memory copy, and write it back, to find out whether the kernel lets them;
# threads of one process recognise each other by it.
_PROBE = ctypes.create_string_buffer(secrets.token_bytes(_PROBE_BYTES), _PROBE_BYTES)
_MAX_ADDRESS = (1 << 64) - 1
_MAX_NAME_CHARS = 512


@dataclass(frozen=True, slots=True)
class _Entry:
    """A rank's process, as it published it."""

    pid: int
    host: str
    hostname: str
    probe: bytes
    address: int  # of the probe


class Introduction:
    """One rank's part in the rendezvous. Every rank calls the methods, in their order here."""

    def __init__(
        self, store: Store, group: str, rank: int, global_ranks: Sequence[int], timeout: timedelta
    ) -> None:
        self._rank = rank
        self._size = len(global_ranks)
        self._global_ranks = global_ranks
        self._timeout = timeout
        self._store = store
        # Groups made one after another in one store under one name must not read each other's values.
        turn = next_turn(store, f"turn/{rank}")
        self._corner: Store = dist.PrefixStore(f"meeting {turn}", store)  # pyright: ignore[reportPrivateImportUsage]
        self._group = f"group '{group}' of ranks {list(global_ranks)}, meeting {turn}"
        self._secret = self._share_secret() if self._size > 1 else None
        self._sealed = SealedStore(self._corner, self._secret, group=self._group, rank=rank)

    def _share_secret(self) -> Any:
        if self._rank != 0:
            self._wait({SECRET_KEY: 0})
        secret = share_secret(self._corner, self._rank, bound_to=address_of(self._store))
        if secret is None:
            raise ConfigError(
                f"rank {self._global_ranks[0]} could not make the group: it can't share a secret with "
                "the others, so any client of their store could forge its values. Give all ranks the same "
                "WEFT_SECRET_FILE, or use backend 'gloo'."
            )
        return secret

    def members(self) -> list[Member]:
        """Publish this rank's process, read the others', and check that all share a host."""
        me = {
            "pid": os.getpid(),
            "host": kernel.host_identity(),
            "hostname": socket.gethostname(),
            "probe": _PROBE.raw.hex(),
            "address": ctypes.addressof(_PROBE),
            "meeting": secrets.token_hex(16),
        }
        values = self._exchange("member", json.dumps(me))
        entries = [self._read_entry(rank, value) for rank, value in enumerate(values)]
        self._first_pid = entries[0].pid
        hosts = {entry.host for entry in entries}
        if len(hosts) > 1:
            where = ", ".join(
                f"rank {rank} on {entry.hostname!r}"
                for rank, entry in zip(self._global_ranks, entries, strict=True)
            )
            raise ConfigError(
                f"backend 'weft' joins ranks of one host (and one container), and these are on {len(hosts)}: "
                f"{where}. Use backend 'gloo' or 'nccl' between hosts."
            )
        # Binds all later values to this meeting: every rank's nonce is in the digest.
        digest = hashlib.sha256(b"".join(len(value).to_bytes(8, "little") + value for value in values))
        group = f"{self._group} ({digest.hexdigest()})"
        self._sealed = SealedStore(self._corner, self._secret, group=group, rank=self._rank)
        return [
            self._member(global_rank, entry)
            for global_rank, entry in zip(self._global_ranks, entries, strict=True)
        ]

    def _member(self, global_rank: int, entry: _Entry) -> Member:
        member = Member(global_rank, entry.pid)
        if entry.probe == _PROBE.raw and member.pid == os.getpid():
            return replace(member, is_reachable=True, is_thread_here=True)
        try:
            check_process(member.pid, f"rank {global_rank}, which is process {member.pid},")
        except (FileNotFoundError, PermissionError):
            return member  # gone, or undumpable: the next wait for it raises
        return replace(member, is_reachable=kernel.can_reach(member.pid, entry.address, entry.probe))

    def _read_entry(self, rank: int, value: bytes) -> _Entry:
        what = f"the entry of rank {self._global_ranks[rank]} in the group's store"
        fields = _read_json(value, what)
        if type(fields) is not dict:
            raise _refusal(what)
        texts = [fields.get(name) for name in ("host", "hostname", "probe")]
        if not all(type(text) is str and len(text) <= _MAX_NAME_CHARS for text in texts):
            raise _refusal(what)
        host, hostname, probe = cast("list[str]", texts)
        try:
            probe_bytes = bytes.fromhex(probe)
        except ValueError:
            probe_bytes = b""
        if len(probe_bytes) != _PROBE_BYTES:
            raise _refusal(what)
        pid = check_integer(fields.get("pid"), f"the process id in {what}", 1, MAX_PID)
        address = check_integer(fields.get("address"), f"the address in {what}", 1, _MAX_ADDRESS)
        return _Entry(pid, host, hostname, probe_bytes, address)

    def page(self, num_bytes: int) -> Segment:
        """The board's shared page: made by rank 0, opened by the others."""
        if self._rank == 0:
            try:
                segment = own_segment(num_bytes, is_reclaimed=False)
            except ConfigError as error:
                self._sealed.set("page", json.dumps({"error": str(error)}))
                raise
            self._sealed.set("page", json.dumps({"name": tuple(segment.name)}))
            return segment
        first = self._global_ranks[0]
        what = f"rank {first}'s entry on the page of the group"
        self._wait({"page": 0})
        fields = _read_json(self._sealed.get("page", 0), what)
        if type(fields) is not dict:
            raise _refusal(what)
        if "error" in fields:
            raise ConfigError(f"rank {first} could not make the group: {fields['error']}")
        name = read_segment_name(fields.get("name"), what)
        if name.pid != self._first_pid or name.num_bytes != whole_pages(num_bytes):
            raise _refusal(what)
        return open_segment(name, first)

    def agree_on_direct(self, roster: Roster) -> bool:
        """Whether every rank may read and write every other's memory. WEFT_DIRECT_COPY=0 forbids it.

        Also a barrier: after it every rank has opened the page.
        """
        is_allowed = os.environ.get("WEFT_DIRECT_COPY", "1") != "0"
        is_direct = is_allowed and all(member.is_reachable for member in roster.members)
        values = self._exchange("direct", json.dumps(is_direct))
        if not all(value in (b"true", b"false") for value in values):
            raise _refusal("a rank's entry on direct copies")
        return all(value == b"true" for value in values)

    def _exchange(self, topic: str, mine: str) -> list[bytes]:
        """Every rank's value on a topic, by rank. This rank's own is not read back from the store."""
        keys = {f"{topic}/{rank}": rank for rank in range(self._size)}
        self._sealed.set(f"{topic}/{self._rank}", mine)
        self._wait(keys)
        return [
            mine.encode() if rank == self._rank else self._sealed.get(key, rank) for key, rank in keys.items()
        ]

    def _wait(self, keys: Mapping[str, int]) -> None:
        try:
            self._corner.wait(list(keys), self._timeout)
        except (dist.DistStoreError, RuntimeError) as error:
            ranks = [self._global_ranks[rank] for key, rank in keys.items() if not self._has(key)]
            raise PeerTimeoutError(
                f"rank {self._global_ranks[self._rank]} waited {self._timeout.total_seconds():g} s for "
                f"others to join a group of {self._size} ranks. Not there: {ranks}. Check that these ranks "
                "were started and make the same groups in the same order.",
                ranks,
            ) from error

    def _has(self, key: str) -> bool:
        try:
            return self._corner.check([key])
        except RuntimeError:
            return False


def _read_json(value: bytes, what: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _refusal(what) from error


def _refusal(what: str) -> TamperedError:
    return TamperedError(
        f"{what} was refused: its types or lengths are not those that a rank writes. It was not used. Either "
        "the ranks run different versions of weft, or another program has the job's secret."
    )
