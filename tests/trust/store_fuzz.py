"""Feed values that no rank wrote to what reads the stores in which ranks meet.

    scripts/store_fuzz --values 1000000 --seed 7

A value is made by a grammar that knows what each reader expects: JSON of the right fields with one or several
wrong ones, text that is hardly JSON, or bytes. It is written as a client of the store would write it who does
not know the job's secret (bare, with another secret's seal, with a seal of this job's from another key, rank,
group or meeting, with a seal that was changed), or as a rank of another version might, sealed as it must be.
The readers: a local group's meeting, the choice of an engine, the secret's place, blame notes, the desync
check, cards and lists of RPC workers.

Whatever is in a value: one without its seal is refused by name, nothing is opened but memory of weft's own
kind, nothing runs, no error but weft's is raised, and the process does not grow.

Values come in batches; the seed of a batch follows from the run's seed and the batch's number, so that a
failure can be had again with `--batch`.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import random
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist

from weft.comm import blame, desync
from weft.errors import ConfigError, DesyncError, PeerError, StateError, TamperedError, UnfitError
from weft.launcher import agreement
from weft.local import introduction, kernel
from weft.local.introduction import Introduction
from weft.local.segment import Segment, own_segment, whole_pages
from weft.rpc.meeting import Meeting
from weft.rpc.secret import share_own_secret
from weft.rpc.workers import Card, this_host
from weft.trust import (
    JobSecret,
    SealedStore,
    expose_secret,
    install_secret,
    job_secret,
    make_secret,
    seal_memory,
    share_secret,
)

BATCH_VALUES = 2_000
GROWTH_BYTES = 64 << 20
WARM_UP_BATCHES = 5
SOON = timedelta(seconds=5)
Store = Any
Chance = random.Random

# Who wrote a value. A rank's is sealed as it must be; all others know no secret of this job's.
RANK, BARE, FOREIGN, MOVED, CHANGED = "rank", "bare", "foreign", "moved", "changed"
WRITERS = (RANK, RANK, RANK, BARE, FOREIGN, MOVED, CHANGED)

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 1 << 22, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63), 10**40,
    0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "1", "self", "../../tmp/evil", "\0", "\n",
    "\ud800", "x" * 5000, "/proc/self/mem", "ipc:///tmp/x", "ipc:///proc/self/fd/3", "tcp://10.0.0.1:1",
    "cuda:0", [], {}, [[]], [1, 2, 3], [1, 2, 3, 4, 5], [True] * 5, ["self", 1, 1, 4096, 1],
    {"a": {"b": []}}, {"": 1},
]  # fmt: skip
TEXTS = [
    b"", b"{", b"}", b"[", b"nan", b"NaN", b"-", b"1e999", b"0" * 5000, b"9" * 5000, b"[" * 3000,
    b'{"a":' * 2000, b'"\\ud800"', b"\xff\xfe", b"\0", b"true", b"[]", b"{}", b"null", b'{"a":1,"a":2}',
    b'"' + b"x" * 9000 + b'"',
]  # fmt: skip


def odd(chance: Chance) -> Any:
    """A value that stands where another one should."""
    if chance.random() < 0.2:
        return chance.choice(
            (os.getpid(), chance.randrange(64), chance.getrandbits(chance.choice((8, 31, 64))))
        )
    return chance.choice(ODD)


def craft(right: Any, chance: Chance) -> bytes:
    """Text that is like the JSON of `right`."""
    draw = chance.random()
    if draw < 0.1:
        return chance.choice(TEXTS)
    if draw < 0.15:
        return chance.randbytes(chance.choice((1, 32, 33, 64, 500)))
    value = json.loads(json.dumps(right))
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
        value = _change(value, chance)
    text = json.dumps(value).encode()
    if draw > 0.9:
        at = chance.randrange(len(text) + 1)
        text = (
            text[:at]
            + chance.choice((b"", b",", b"}", chance.randbytes(2)))
            + text[at + chance.randrange(3) :]
        )
    return text


def _change(value: Any, chance: Chance) -> Any:
    """The same with another part."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        value = dict(cast("dict[str, Any]", value))
        name = chance.choice(list(value))
        if chance.random() < 0.1:
            del value[name]
        elif chance.random() < 0.1:
            value[chance.choice(("x", "__class__", name + "2"))] = odd(chance)
        else:
            value[name] = _change(value[name], chance)
        return value
    if isinstance(value, list) and value and chance.random() < 0.7:
        value = list(cast("list[Any]", value))
        at = chance.randrange(len(value))
        act = chance.randrange(6)
        if act == 0:
            del value[at]
        elif act == 1:
            value.insert(at, odd(chance))
        else:
            value[at] = _change(value[at], chance)
        return value
    if isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.3:
        return value + chance.choice((-1, 1, 1 << 31))
    return odd(chance)


@dataclass
class Tally:
    """What became of the values."""

    values: int = 0
    accepted: int = 0
    refused: int = 0
    believed: Counter[str] = field(default_factory=Counter[str])  # accepted, by reader


class Fuzz:
    """The readers, and what they are given."""

    def __init__(self) -> None:
        self.secret, self.other = make_secret(), make_secret()
        self.group = "of ranks [4, 7]"
        self.page = own_segment(introduction.whole_pages(1), is_reclaimed=False)
        self.place = list(expose_secret(make_secret()))
        self.rpc_place = share_own_secret()[1]
        self.decoys = Decoys()
        self.real_open = introduction.open_segment
        state = SimpleNamespace(rank=0, global_rank=0, ranks=(0, 1), name="g", words=lambda: "group 'g'")
        self.group_state = state
        self.readers: dict[str, Callable[[Chance, str], bool]] = {
            "member": self.read_member,
            "page": self.read_page,
            "turn": self.read_turn,
            "secret": self.read_secret,
            "facts": self.read_facts,
            "summary": self.read_summary,
            "note": self.read_note,
            "desync": self.read_desync,
            "card": self.read_card,
            "members": self.read_members,
            "place": self.read_place,
            "verdict": self.read_verdict,
            "epoch": self.read_epoch,
        }

    def close(self) -> None:
        self.decoys.close()

    # How values are written

    def write(
        self,
        store: Store,
        key: str,
        content: bytes,
        writer: str,
        chance: Chance,
        *,
        group: str,
        rank: Any = 0,
    ) -> None:
        """Write a value as this writer would."""
        store.set(key, self.sealed(key, content, writer, chance, group=group, rank=rank))

    def sealed(
        self, key: str, content: bytes, writer: str, chance: Chance, *, group: str, rank: int = 0
    ) -> bytes:
        nowhere = dist.HashStore()

        def seal(secret: JobSecret, at: str, in_group: str, by: Any) -> bytes:
            return SealedStore(nowhere, secret, group=in_group, rank=by).seal(at, content)

        if writer == RANK:
            return seal(self.secret, key, group, rank)
        if writer == BARE:
            return content
        if writer == FOREIGN:
            return seal(self.other, key, group, rank)
        if writer == MOVED:
            where = [
                (key + "0", group, rank),
                (key, group + " ", rank),
                (key, group, rank + 1),
                (key, group, str(rank)),
            ]
            return seal(self.secret, *chance.choice(where))
        right = bytearray(seal(self.secret, key, group, rank))
        act = chance.randrange(3)
        if act == 0 or len(right) < 34:
            right[chance.randrange(len(right))] ^= 1 << chance.randrange(8)
        elif act == 1:
            del right[chance.randrange(len(right)) :]
        else:
            right += chance.randbytes(chance.choice((1, 32)))
        return bytes(right)

    # The local group's meeting

    def _meet(self, store: Store, rank: int = 1) -> Introduction:
        if rank != 0:
            store.set(
                "meeting 1/secret", '{"given": true}'
            )  # rank 0 is waited for, also by ranks that have it
        return Introduction(store, "g", rank, [4, 7], SOON)

    def _member(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "host": kernel.host_identity(),
            "hostname": "h",
            "probe": introduction._PROBE.raw.hex(),
            "address": 1 << 40,
            "meeting": "0" * 32,
        }

    def read_member(self, chance: Chance, writer: str) -> bool:
        store = dist.HashStore()
        meeting = self._meet(store)
        self.write(
            meeting._corner, "member/0", craft(self._member(), chance), writer, chance, group=meeting._group
        )
        members = meeting.members()
        assert type(members[0].pid) is int
        assert 1 <= members[0].pid <= 1 << 22
        return True

    def read_page(self, chance: Chance, writer: str) -> bool:
        meeting = self._meet(dist.HashStore())
        self.write(
            meeting._corner,
            "member/0",
            json.dumps(self._member()).encode(),
            RANK,
            chance,
            group=meeting._group,
        )
        meeting.members()
        opened: list[Any] = []

        def open_segment(name: Any, rank: int) -> Segment:
            opened.append(name)
            return self.real_open(name, rank)

        right: Any = {"error": "no memory"} if chance.random() < 0.1 else {"name": list(self.page.name)}
        self.write(
            meeting._corner, "page", craft(right, chance), writer, chance, group=meeting._sealed._group
        )
        with mock.patch.object(introduction, "open_segment", open_segment):
            page = meeting.page(1)
        (name,) = opened
        assert name[0] == os.getpid()
        assert all(type(number) is int for number in name)
        assert page.tensor.numel() == whole_pages(1)
        return True

    def read_turn(self, chance: Chance, writer: str) -> bool:
        store = dist.HashStore()
        store.set("turn/0", craft(chance.choice((0, 3, 10**6)), chance))
        meeting = self._meet(store, rank=0)
        turn = int(re.findall(r"meeting (\d+)$", meeting._group)[0])
        assert 1 <= turn <= (1 << 62) + 1
        return True

    # The job's secret

    def read_secret(self, chance: Chance, writer: str) -> bool:
        """Of ranks that were given none: the entry is not sealed, and may lead to any process."""
        install_secret(None)
        store = dist.HashStore()
        store.set("secret", craft(chance.choice(self._places()), chance))
        with self.decoys.untouched():
            secret = share_secret(store, 1, bound_to="here")
        assert secret is None or type(secret) is JobSecret
        return True

    def _places(self) -> list[Any]:
        return [
            {"place": self.place},
            {"given": True},
            {"none": "it can't"},
            *[{"place": place} for place in self.decoys.places],
        ]

    def read_place(self, chance: Chance, writer: str) -> bool:
        store = dist.HashStore()
        right = json.loads(self.rpc_place)
        if chance.random() < 0.5:
            right["place"] = chance.choice(self.decoys.places)
        self._corner(store, 1).set("secret", craft(right, chance))
        with self.decoys.untouched():
            secret = Meeting(store, SOON.total_seconds(), is_static=True, rank=1).share_secret(1)
        assert type(secret) is JobSecret
        return True

    # The choice of an engine

    def read_facts(self, chance: Chance, writer: str) -> bool:
        facts = agreement._RankFacts("h", "the default backend", None, None, has_nccl=False, number="0" * 16)
        store = dist.HashStore()
        self.write(store, "facts/1", craft(asdict(facts), chance), writer, chance, group="init", rank=1)
        sealed = SealedStore(store, self.secret, group="init", rank=0)
        found = agreement._read_facts(sealed.get_json("facts/1", 1), 1)
        assert type(found.has_nccl) is bool
        texts = (found.host, found.asked, found.gpu, found.obstacle, found.number)
        assert all(text is None or (type(text) is str and len(text) <= 4096) for text in texts)
        return True

    def read_summary(self, chance: Chance, writer: str) -> bool:
        summary = agreement._Summary(1, True, False, None, ["g"], ["0" * 16, "1" * 16])
        store = dist.HashStore()
        self.write(store, "summary", craft(asdict(summary), chance), writer, chance, group="init")
        sealed = SealedStore(store, self.secret, group="init", rank=1)
        found = agreement._read_summary(sealed.get_json("summary", 0), 2)
        assert type(found.num_gpus) is int
        assert 0 <= found.num_gpus <= 2
        assert len(found.numbers) == 2
        assert all(type(number) is str for number in found.numbers)
        return True

    # Notes and checks of collectives

    def read_note(self, chance: Chance, writer: str) -> bool:
        store = dist.HashStore()
        group = "group 'g' in world ''"
        self.write(
            store, "weft/failed/g/1", craft([5, "all_reduce"], chance), writer, chance, group=group, rank=1
        )
        with self._as_a_group(blame, store), mock.patch.object(blame, "_GRACE_SECS", 5.0):
            notes = blame._exchange_notes(cast(Any, None), "failed", 5, "all_reduce")
        assert (1 in notes.by_rank) != (1 in notes.refused)
        if 1 not in notes.by_rank:
            raise TamperedError(notes.refused[1])
        number, words = notes.by_rank[1]
        assert type(number) is int
        assert type(words) is str
        return True

    def read_desync(self, chance: Chance, writer: str) -> bool:
        store = dist.HashStore()
        right = [["all_reduce", [[1]], ["torch.float32"], "sum"], "all_reduce", "train.py:3"]
        group = "group 'g' in world ''"
        self.write(store, "weft/desync/g/5/1", craft(right, chance), writer, chance, group=group, rank=1)
        call = SimpleNamespace(
            group=None, op="all_reduce", number=5, inputs=(torch.ones(1),), outputs=(), detail="sum",
            site="train.py:3", words=lambda: "all_reduce",
        )  # fmt: skip
        with self._as_a_group(desync, store):
            desync.DesyncCheck(5.0).started(cast(Any, call))
        return True

    @contextlib.contextmanager
    def _as_a_group(self, module: Any, store: Store) -> Generator[None]:
        with (
            mock.patch.object(module, "state_of", return_value=self.group_state),
            mock.patch.object(module, "store_of", return_value=store),
            mock.patch.object(module, "world_name", return_value=""),
        ):
            yield

    # RPC workers

    def _corner(self, store: Store, turn: int) -> Store:
        return dist.PrefixStore(str(turn), dist.PrefixStore("weft_rpc", store))

    def _workers(self, store: Store, *, is_static: bool) -> Meeting:
        meeting = Meeting(store, SOON.total_seconds(), is_static=is_static, rank=1)
        meeting.seal_with(self.secret)
        return meeting

    def _card(self) -> dict[str, Any]:
        card = Card(
            "worker0", 0, this_host(), 77, "ipc:///proc/77/fd/5", "tcp://10.0.0.5:4000", [77, 4, 1, 4096, 99]
        )
        return json.loads(card.encode())

    def _check_card(self, card: Card) -> None:
        assert card.id == 0
        assert type(card.name) is str
        assert re.fullmatch(r"ipc://(/proc/\d+/fd/\d+|@weft-rpc-[0-9a-f]{32})", card.local_address)
        assert card.remote_address is None or card.remote_address.startswith("tcp://")
        assert len(card.bell) == 5
        assert all(type(number) is int for number in card.bell)

    def read_card(self, chance: Chance, writer: str) -> bool:
        store = dist.HashStore()
        meeting = self._workers(store, is_static=True)
        self.write(
            meeting._corner, "card/0", craft(self._card(), chance), writer, chance, group=meeting._group
        )
        (card,) = meeting.read_all(1)
        self._check_card(card)
        return True

    def read_members(self, chance: Chance, writer: str) -> bool:
        store = dist.HashStore()
        meeting = self._workers(store, is_static=False)
        content = craft(self._card(), chance)
        sealed = self.sealed("card/0", content, writer, chance, group=meeting._group)
        members: Any = {"card/0": base64.b64encode(sealed).decode(), "place/0": self.rpc_place}
        is_whole = chance.random() < 0.5
        meeting._corner.set("members", json.dumps(members) if is_whole else craft(members, chance))
        for card in meeting.members():
            self._check_card(card)
            assert writer == RANK
        return True

    def read_verdict(self, chance: Chance, writer: str) -> bool:
        store = dist.HashStore()
        meeting = self._workers(store, is_static=True)
        content = chance.choice((b"-", b"worker1 can't", craft("x", chance)))
        self.write(meeting._corner, "verdict", content, writer, chance, group=meeting._group)
        assert len(meeting.read_reports(1, 2)) <= 4000
        return True

    def read_epoch(self, chance: Chance, writer: str) -> bool:
        store = dist.HashStore()
        key, content = chance.choice((("kind", b"static"), ("epoch", b"77"), ("turn/1", b"3")))
        corner = dist.PrefixStore("weft_rpc", store) if key != "epoch" else self._corner(store, 1)
        corner.set(key, chance.choice((content, craft(77, chance))))
        meeting = Meeting(store, SOON.total_seconds(), is_static=True, rank=1)
        assert 0 <= meeting.epoch < 1 << 63
        return True

    # One value

    def run(self, chance: Chance, tally: Tally) -> None:
        """Write one value and have it read."""
        name = chance.choice(list(self.readers))
        writer = chance.choice(WRITERS)
        tally.values += 1
        install_secret(self.secret)
        refusal: Exception | None = None
        try:
            with only_own_memory_is_opened():
                self.readers[name](chance, writer)
        except (TamperedError, ConfigError, UnfitError, PeerError, StateError, DesyncError) as error:
            refusal = error
        must_be_refused = writer != RANK and name in SEALED
        if refusal is None:
            tally.accepted += 1
            tally.believed[name] += 1
            assert not must_be_refused, f"a value that is {writer} was believed by '{name}'"
        else:
            tally.refused += 1
            assert len(str(refusal)) < 20_000, "the error repeats the value"
            assert not must_be_refused or isinstance(refusal, TamperedError | PeerError), repr(refusal)


# The readers of one sealed value; the others read what is not sealed, or several.
UNSEALED = ("turn", "secret", "place", "epoch", "members")
SEALED = ("member", "page", "facts", "summary", "note", "desync", "card", "verdict")


class Decoys:
    """Files of this process that a value may name, and no value may have opened."""

    def __init__(self) -> None:
        self._file, name = tempfile.mkstemp()
        os.unlink(name)
        os.write(self._file, b"dear" * 8)
        self._pipe = os.pipe()
        self._unsealed = os.memfd_create("weft-secret")
        self._named = os.memfd_create("weft", os.MFD_ALLOW_SEALING)
        for fd in (self._unsealed, self._named):
            os.ftruncate(fd, 32)
        seal_memory(self._named)
        self.fds = [self._file, *self._pipe, 0, 1, 2]
        fds = [*self.fds, self._unsealed, self._named]
        self.places = [[os.getpid(), fd, os.fstat(fd).st_ino] for fd in fds]

    @contextlib.contextmanager
    def untouched(self) -> Generator[None]:
        """No file that is not a memfd under the name of a secret's memory is opened inside."""
        forbidden = {f"/proc/{os.getpid()}/fd/{fd}" for fd in [*self.fds, self._named]}
        before = len(_opened)
        try:
            yield
        finally:
            assert not forbidden & set(_opened[before:]), "a file was opened that is not weft's memory"

    def close(self) -> None:
        for fd in (self._file, *self._pipe, self._unsealed, self._named):
            os.close(fd)


# What Python does meanwhile, as its audit events tell.
_DEADLY = ("exec", "compile", "import", "os.exec", "os.system", "os.posix_spawn", "os.fork", "subprocess.",
           "ctypes.dlopen", "shutil.", "pickle.find_class", "marshal.", "os.remove", "os.rename", "os.mkdir",
           "os.link", "os.symlink", "os.truncate", "os.kill", "socket.connect", "socket.bind")  # fmt: skip
_MAY_BE_OPENED = re.compile(r"/proc/(\d+/fd/\d+|sys/kernel/random/boot_id|self/ns/(net|pid))")
_opened: list[str] = []
_heard: list[str] | None = None
_is_installed = False


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if _heard is None:
        return
    if event == "open":
        path = args[0] if isinstance(args[0], str) else ""
        _opened.append(path)
        if path and _MAY_BE_OPENED.fullmatch(path) is None:
            _heard.append(f"open {path}")
    elif event.startswith(_DEADLY):
        _heard.append(f"{event} {args!r:.200}")


@contextlib.contextmanager
def only_own_memory_is_opened() -> Generator[None]:
    """Raise AssertionError if anything runs inside, or a file is opened by another path than /proc's."""
    global _heard, _is_installed
    if not _is_installed:
        sys.addaudithook(_hear)  # for good: a hook can't be taken out
        _is_installed = True
    _heard = heard = []
    _opened.clear()
    try:
        yield
    finally:
        _heard = None
    assert heard == [], f"it did {heard}"


def run_batch(fuzz: Fuzz, seed: int, batch: int, num_values: int, tally: Tally) -> None:
    chance = random.Random(f"{seed}/{batch}")
    before = job_secret()
    num_files = len(os.listdir("/proc/self/fd"))
    try:
        for index in range(num_values):
            state = chance.getstate()
            try:
                fuzz.run(chance, tally)
            except BaseException as error:
                reader = random.Random()
                reader.setstate(state)
                name = reader.choice(list(fuzz.readers))
                error.add_note(f"--seed {seed} --batch {batch}, value {index} of it, read as '{name}'")
                raise
    finally:
        install_secret(before)
    grown = len(os.listdir("/proc/self/fd")) - num_files
    assert grown <= 0, f"--seed {seed} --batch {batch}: {grown} descriptors stay open"


def run_values(num_values: int, seed: int, progress: Callable[[Tally], None] | None = None) -> Tally:
    """Have so many values read. Raises what one led to that it must not, with the seed in its notes."""
    tally = Tally()
    start_bytes = 0
    fuzz = Fuzz()
    try:
        for batch in range(-(-num_values // BATCH_VALUES)):
            run_batch(fuzz, seed, batch, min(BATCH_VALUES, num_values - tally.values), tally)
            if batch == WARM_UP_BATCHES:
                start_bytes = _peak_bytes()
            elif batch > WARM_UP_BATCHES and (grown := _peak_bytes() - start_bytes) > GROWTH_BYTES:
                raise AssertionError(f"the process grew by {grown:,} bytes in {tally.values:,} values")
            if progress is not None:
                progress(tally)
    finally:
        fuzz.close()
    return tally


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/store_fuzz", description="Fuzz the values in ranks' stores."
    )
    parser.add_argument("--values", type=int, default=1_000_000, help="how many values to write")
    parser.add_argument("--seed", type=int, default=None, help="repeat a run; a new one by default")
    parser.add_argument("--batch", type=int, default=None, help="only this batch of the run")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    if options.batch is not None:
        tally = Tally()
        run_batch(Fuzz(), seed, options.batch, BATCH_VALUES, tally)
        print(f"batch {options.batch}: {tally}")
        return
    started_at = said_at = time.monotonic()

    def say(tally: Tally) -> None:
        nonlocal said_at
        now = time.monotonic()
        if now - said_at >= 5 or tally.values >= options.values:
            said_at = now
            print(
                f"{tally.values:>12,} values, {tally.accepted:,} accepted, {tally.refused:,} refused, "
                f"{tally.values / (now - started_at):,.0f} a second, {_peak_bytes() >> 20} MiB, seed {seed}",
                flush=True,
            )

    run_values(options.values, seed, say)
    print(f"ok: {options.values:,} values, seed {seed}")


if __name__ == "__main__":
    main()
