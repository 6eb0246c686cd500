"""Rendezvous of workers in a store: cards, reports on connections, and the members of a dynamic group.

The store is not trusted. A worker's entries are plain data, sealed with the group's secret, and checked when
they are read. Only the location of a shared secret is not sealed: a false one leads, at most, to another
secret of this user.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from weft.errors import (
    ConfigError,
    InternalError,
    PeerError,
    PeerTimeoutError,
    TamperedError,
    UnfitError,
)
from weft.rpc.secret import read_shared_secret, share_own_secret, share_secret
from weft.rpc.workers import Card, check_distinct, is_listening
from weft.trust import MAX_VALUE_BYTES, JobSecret, SealedStore, address_of, check_integer, next_turn

Store = Any  # torch.distributed.Store, which is not declared as exported
SAME_SECRET = "All workers must have the same secret (WEFT_RPC_SECRET, or the option secret=)."

_LONGEST_WAIT_SECS = 24 * 3600.0
_CARD, _PLACE = "card/", "place/"  # of a member of a dynamic group: its card, and where it shares the secret
_MEMBER = re.compile(r"(card|place)/[0-9]{1,10}")
_EPOCH = re.compile(r"[0-9]{1,19}")
_MAX_PROBLEM_LENGTH = 4000
_NO_SECRET = b"no secret"  # in the place of a card


class Meeting:
    """The keys of one group in the store."""

    def __init__(self, store: Store, timeout_secs: float, *, is_static: bool, rank: int) -> None:
        self._rank = rank
        self._timeout = timedelta(seconds=timeout_secs or _LONGEST_WAIT_SECS)
        # Secrets that workers share are bound to it: workers of two groups can't be led to each other.
        self._address = address_of(store)
        corner = dist.PrefixStore("weft_rpc", store)  # pyright: ignore[reportPrivateImportUsage]
        corner.set_timeout(self._timeout)
        kind = "static" if is_static else "dynamic"
        if _agree(corner, "kind", kind) != kind:
            raise UnfitError(
                "RPC group mixes statically and dynamically initialized members which is not supported. "
                "Give every worker the same world_size, or none of them."
            )
        # Workers that meet at this store for the n-th time meet the others' n-th time.
        turn = next_turn(corner, f"turn/{rank}") if is_static else 0
        self._corner: Store = dist.PrefixStore(str(turn), corner)  # pyright: ignore[reportPrivateImportUsage]
        self._corner.set_timeout(self._timeout)
        epoch = _agree(self._corner, "epoch", str(secrets.randbits(63)))
        self.epoch = check_integer(
            int(epoch) if _EPOCH.fullmatch(epoch) else epoch, "init_rpc: the group's epoch", 0, (1 << 63) - 1
        )
        self._group = f"rpc/{kind}/{turn}/{self.epoch}"
        self._place: str | None = None  # where this worker shares the secret
        self._sealed: SealedStore | None = None

    # The secret

    def share_secret(self, rank: int) -> JobSecret:
        """Return the secret of a static group on one host that was given none. Rank 0 makes it."""
        if rank == 0:
            secret, place = share_own_secret()
            self._corner.set("secret", place)
            return secret.derive_secret(self._address)
        who = "the first worker (rank 0)"
        try:
            secret = read_shared_secret(self._wait_for("secret", who))
        except (ConfigError, TamperedError):
            self._corner.set(f"card/{rank}", _NO_SECRET)  # ends the others' wait for this worker's card
            raise
        if secret is None:
            raise PeerError(f"init_rpc: {who} ended while its secret was read.", [0])
        return secret.derive_secret(self._address)

    def find_secret(self) -> JobSecret:
        """The same for a dynamic group: that of a member that is still there, else a new one.

        Each member shares it, so that it can be read as long as one of them lives.
        """
        while True:
            before = _agree(self._corner, "members", "{}")
            members = _parse_members(before)
            for key, place in members.items():
                secret = read_shared_secret(place) if key.startswith(_PLACE) else None
                if secret is not None:
                    self._place = share_secret(secret)
                    return secret.derive_secret(self._address)
            if members and not any(key.startswith(_PLACE) for key in members):
                raise ConfigError(
                    "init_rpc: the workers of this group were given a secret, and this one was not. "
                    f"{SAME_SECRET}"
                )
            # No process that shared one is left.
            secret, self._place = share_own_secret()
            if self._replace(before, {f"{_PLACE}{self._rank}": self._place}):
                return secret.derive_secret(self._address)

    def seal_with(self, secret: JobSecret) -> None:
        """Seal all entries from now on with the secret."""
        self._sealed = SealedStore(self._corner, secret, group=self._group, rank=self._rank)

    @property
    def _seal(self) -> SealedStore:
        if self._sealed is None:
            raise InternalError("a meeting without a secret")
        return self._sealed

    # Cards

    def publish(self, card: Card) -> None:
        """Leave this worker's card."""
        self._seal.set(f"card/{card.id}", card.encode())

    def read_all(self, world_size: int) -> list[Card]:
        """Return the cards of every worker of a static group; waits for those that are not there yet."""
        return [
            Card.decode(
                self._wait_sealed(f"card/{rank}", rank, f"rank {rank} of {world_size}"), rank, "the store"
            )
            for rank in range(world_size)
        ]

    def report(self, rank: int, problem: str) -> None:
        """Publish whether this worker can connect to the first; `problem` is empty if it can."""
        self._seal.set(f"report/{rank}", problem or "-")

    def read_reports(self, rank: int, world_size: int) -> str:
        """Return the problems of a static group's workers, gathered by the first; empty if there are none."""
        if rank == 0:
            reports = [
                self._wait_sealed(f"report/{other}", other, f"rank {other}") for other in range(1, world_size)
            ]
            problems = " ".join(_as_text(report) for report in reports if report != b"-")
            self._seal.set("verdict", problems or "-")
        verdict = _as_text(self._wait_sealed("verdict", 0, "the first worker (rank 0)"))
        return "" if verdict == "-" else verdict

    def _wait_sealed(self, key: str, writer: int, who: str) -> bytes:
        value = self._wait_for(key, who)
        if value == _NO_SECRET:
            raise PeerError(
                f"init_rpc: the worker of rank {writer} can't read this group's secret: it runs on another "
                f"host, or as another user. {SAME_SECRET}",
                [writer],
            )
        return self._seal.unseal(key, writer, value)

    def _wait_for(self, key: str, who: str) -> bytes:
        try:
            value = self._corner.get(key)
        except RuntimeError as error:  # DistStoreError; of a file store a plain one
            raise PeerTimeoutError(
                f"init_rpc: {who} did not come within {self._timeout.total_seconds():g} seconds "
                "(rpc_timeout). Every worker must call init_rpc with the same world_size and init_method."
            ) from error
        return _bounded(value, key)

    # Members of a dynamic group

    def members(self) -> list[Card]:
        """Return the cards of the members."""
        return self._cards(_parse_members(_agree(self._corner, "members", "{}")))

    def join(self, card: Card) -> list[Card]:
        """Join the members; returns the cards of those who were there before."""
        sealed = base64.b64encode(self._seal.seal(f"{_CARD}{card.id}", card.encode())).decode()

        def add(members: dict[str, str]) -> dict[str, str]:
            cards = self._cards(members)
            rivals = [other for other in cards if other.id == card.id or other.name == card.name]
            # One that died could not leave: nothing listens at its address.
            alive = [other for other in rivals if is_listening(other)]
            check_distinct([*alive, card])
            if alive:
                raise UnfitError(
                    f"init_rpc: rank {card.id} is not unique: another worker of that rank is there."
                )
            for other in rivals:
                members = _without(members, other.id)
            place = {} if self._place is None else {f"{_PLACE}{card.id}": self._place}
            return {**members, f"{_CARD}{card.id}": sealed, **place}

        return self._cards(self._change_members(add))

    def leave(self, worker_id: int) -> None:
        """Leave the members."""
        self._change_members(lambda members: _without(members, worker_id))

    def _change_members(self, change: Callable[[dict[str, str]], dict[str, str]]) -> dict[str, str]:
        """Change the list of members atomically (compare and set); returns the list before."""
        while True:
            before = _agree(self._corner, "members", "{}")
            if self._replace(before, change(_parse_members(before))):
                return _parse_members(before)

    def _replace(self, before: str, members: dict[str, str]) -> bool:
        after = json.dumps(members)
        return before == after or _text(self._corner.compare_set("members", before, after)) == after

    def _cards(self, members: dict[str, str]) -> list[Card]:
        cards: list[Card] = []
        for key, text in members.items():
            if key.startswith(_CARD):
                worker_id = int(key.removeprefix(_CARD))
                try:
                    sealed = base64.b64decode(text, validate=True)
                except ValueError:
                    sealed = b""  # which unseal refuses
                card = self._seal.unseal(key, worker_id, sealed)
                cards.append(Card.decode(card, worker_id, "the store"))
        return cards


def _parse_members(text: str) -> dict[str, str]:
    """Decode the list of members of a dynamic group: sealed cards, and where they share the secret."""
    members: Any = None
    try:
        members = json.loads(text)
        is_right = isinstance(members, dict) and all(
            _MEMBER.fullmatch(key) and type(value) is str
            for key, value in cast("dict[str, object]", members).items()
        )
    except (ValueError, RecursionError):
        is_right = False
    if not is_right:
        raise TamperedError(
            "init_rpc: the list of members in the store is not one that workers write. It was not used: find "
            "out who else can write to the store, or use another init_method."
        )
    return members


def _without(members: dict[str, str], worker_id: int) -> dict[str, str]:
    gone = (f"{_CARD}{worker_id}", f"{_PLACE}{worker_id}")
    return {key: value for key, value in members.items() if key not in gone}


def _as_text(value: bytes) -> str:
    return value.decode(errors="replace")[:_MAX_PROBLEM_LENGTH]


def _agree(store: Store, key: str, proposal: str) -> str:
    """Propose a value for a key; returns the one that was proposed first."""
    return _text(_bounded(store.compare_set(key, "", proposal), key))


def _bounded(value: bytes, key: str) -> bytes:
    if len(value) > MAX_VALUE_BYTES:
        raise TamperedError(
            f"init_rpc: the value '{key}' in the store has {len(value):,} bytes, far more than workers "
            "write. It was not used: find out who else can write to the store."
        )
    return value


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")
