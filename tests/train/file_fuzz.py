"""Read checkpoints, recorded runs and profiles that were damaged, or made by somebody who means harm.

    scripts/file_fuzz --cases 100000 --seed 7

Each case is a copy of a whole folder with one to three things done to it. It must be read, or refused with
one line and, as a command, exit code 2: without a traceback, without running anything, within seconds. A
checkpoint that is refused leaves the model and the folder as they were. The process must not grow.

The seed of a case is the run's seed and its number, so that a failure can be had again with `--seed` alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import weft
from tests.report.made_runs import write_run
from weft.__main__ import main as weft_main
from weft.errors import ConfigError
from weft.planning.profile import load_profile
from weft.training import Checkpoints

MOST_SECS = 10.0
GROWTH_BYTES = 256 << 20
WARM_UP = 50
Chance = random.Random

ran: list[str] = []  # what a file has run: nothing
whole: list[bytes] = []  # the `.metadata` that this program has written itself


def canary(*args: Any) -> Any:
    """What crafted pickles call."""
    ran.append(f"the canary, with {args!r}")


class Calls:
    """Pickles as a call of something."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.called = function, args

    def __reduce__(self) -> Any:
        return self.called


def _listen(event: str, args: tuple[Any, ...]) -> None:
    if event in ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "os.spawn", "pty.spawn"):
        ran.append(f"{event}, with {args!r}")


ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**400, -0.0, 1e-320, 1.7e308, -1.7e308, float("nan"), float("inf"),
    "", "x", "../../etc/passwd", "\ud800", "\0", "\n", "x" * 10_000, [], {}, [[]], [None] * 1000,
    {"a": {"b": []}}, 200_000_000, 0.5, [1, 2], "NaN",
]  # fmt: skip


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


# Bytes.


def flip(content: bytes, chance: Chance) -> bytes:
    found = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 4, 50))):
        if found:
            found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
    return bytes(found)


def cut(content: bytes, chance: Chance) -> bytes:
    return content[: chance.randrange(len(content) + 1)]


def blank(content: bytes, chance: Chance) -> bytes:
    at = chance.randrange(len(content) + 1)
    size = chance.randrange(200)
    return content[:at] + bytes(min(size, len(content) - at)) + content[at + size :]


def splice(content: bytes, chance: Chance) -> bytes:
    at, other = chance.randrange(len(content) + 1), chance.randrange(len(content) + 1)
    return content[:at] + content[other : other + chance.randrange(300)] + content[at:]


def noise(content: bytes, chance: Chance) -> bytes:
    return chance.randbytes(chance.randrange(2000))


def stretch(content: bytes, chance: Chance) -> bytes:
    """Sizes that nothing has: a number of four or eight bytes becomes as large as it can be."""
    size = chance.choice((1, 2, 4, 8))
    at = chance.randrange(max(1, len(content) - size))
    return content[:at] + b"\xff" * size + content[at + size :]


BYTES = (flip, cut, blank, splice, noise, stretch)


# JSON.


def change_json(content: bytes, chance: Chance) -> bytes:
    lines = content.splitlines(keepends=True) if b'"kind"' in content else [content]
    at = chance.randrange(len(lines))
    try:
        value = json.loads(lines[at])
    except (ValueError, RecursionError):
        return flip(content, chance)
    if chance.random() < 0.1:
        text = nested(chance.choice((10, 100, 100_000)))
    else:
        place: Any = {"all": value}
        key: Any = "all"
        while isinstance(place[key], dict | list) and place[key] and chance.random() < 0.9:
            place = place[key]
            key = chance.choice(list(place)) if isinstance(place, dict) else chance.randrange(len(place))
        if isinstance(place, dict) and chance.random() < 0.3 and key != "all":
            del place[key]
        else:
            place[key] = chance.choice(ODD)
        text = json.dumps(value)
    lines[at] = text.encode() + (b"\n" if lines[at].endswith(b"\n") else b"")
    return b"".join(lines)


# Pickles.


def craft_pickle(content: bytes, chance: Chance) -> bytes:
    head = b"\x80\x04"
    called = chance.choice((canary, os.system, eval, print, open, getattr, setattr))
    crafted: list[bytes] = [
        pickle.dumps(Calls(called, "echo weft > /dev/null"), chance.choice((2, 4, 5))),
        pickle.dumps({"state_dict_metadata": Calls(canary, 1)}),
        head + b"c" + canary.__module__.encode() + b"\ncanary\n)R.",
        head + b"(i" + canary.__module__.encode() + b"\ncanary\n.",
        head + b"(c" + canary.__module__.encode() + b"\ncanary\no.",
        head + b"ctorch.distributed.checkpoint.metadata\nMetadata\n}X\x08\x00\x00\x00__init__Nsb.",
        head + b"]" + b"r\xff\xff\xff\xff" + b".",
        head + b"\x8e" + struct.pack("<Q", 2**40) + b".",
        head + b"\x96" + struct.pack("<Q", 2**40) + b".",
        head + b"\x8b" + struct.pack("<i", 2**30) + b".",
        head + b"]\x94" + b"h\x00a" * 1000 + b".",
        head + b"(" * 100_000 + b".",
        head + b")" + b"\x85" * 100_000 + b".",
        head + b"}" * 100_000 + b".",
        b"",
        b".",
    ]
    return chance.choice(crafted)


def change_metadata(content: bytes, chance: Chance) -> bytes:
    """A `.metadata` of torch's own making that says something else."""
    metadata: Any = pickle.loads(whole[0])
    index = chance.choice(list(metadata.storage_data))
    entry = metadata.state_dict_metadata[chance.choice(list(metadata.state_dict_metadata))]
    place = metadata.storage_data[index]
    odd = chance.choice([*ODD, "__0_1.distcp", "..", "a/b", ".metadata", "/etc/passwd", -5, 3, 10**6])
    where = chance.randrange(9)
    if where < 3:
        setattr(place, ("relative_path", "offset", "length")[where], odd)
    elif where == 3:
        entry.size = torch.Size(chance.choice(([], [1], [2**40], [2**31, 2**31], [0])))
    elif where == 4:
        entry.chunks = chance.choice((odd, [], entry.chunks * 2, [odd]))
    elif where == 5:
        entry.properties.dtype = chance.choice((torch.float64, torch.int8, odd))
    elif where == 6:
        metadata.state_dict_metadata = chance.choice((odd, {odd if isinstance(odd, str) else "x": entry}))
    elif where == 7:
        metadata.storage_data = chance.choice((odd, {}, {index: odd}))
    else:
        metadata.storage_data[index] = chance.choice(list(metadata.storage_data.values()))
    return pickle.dumps(metadata)


def change_item(folder: Path, chance: Chance) -> None:
    """One tensor's archive made anew with other parts, and the metadata made to fit it."""
    metadata: Any = pickle.loads(whole[0])
    place = chance.choice(list(metadata.storage_data.values()))
    file = folder / place.relative_path
    if not file.is_file() or file.is_symlink() or file.stat().st_size > 2**22:
        return
    content = file.read_bytes()
    try:
        archive = zipfile.ZipFile(io.BytesIO(content[place.offset : place.offset + place.length]))
        parts = {name: archive.read(name) for name in archive.namelist()}
    except Exception:  # damaged before
        return
    name = chance.choice(list(parts)) if chance.random() < 0.3 else "archive/data.pkl"
    acts = [*BYTES, craft_pickle] if name.endswith(".pkl") else [*BYTES]
    parts[name] = chance.choice(acts)(parts[name], chance)
    if chance.random() < 0.1:
        parts["archive/data/0"] = bytes(20_000_000)
    made = io.BytesIO()
    is_packed = chance.random() < 0.2
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED if is_packed else zipfile.ZIP_STORED) as changed:
        for part, value in parts.items():
            changed.writestr(part, value)
    place.offset, place.length = len(content), len(made.getvalue())
    file.write_bytes(content + made.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


# Folders.


def swap(folder: Path, chance: Chance) -> None:
    one, other = (chance.choice(_files(folder)) for _ in range(2))
    if max(one.stat().st_size, other.stat().st_size) > 2**22:
        return
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def replace_file(folder: Path, chance: Chance) -> None:
    path = chance.choice(_files(folder))
    path.unlink()
    kind = chance.randrange(6)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    elif kind == 2:
        path.symlink_to(chance.choice(("/etc/passwd", "/dev/zero", "nowhere", path.name, "/dev/full")))
    elif kind == 3:
        with path.open("wb") as file:
            file.truncate(chance.choice((0, 1, 2**20, 2**36)))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def damage(folder: Path, chance: Chance) -> None:
    for _ in range(chance.choice((1, 1, 2, 3))):
        files = _files(folder)
        act = chance.randrange(10)
        if not files:
            return
        if act == 0:
            swap(folder, chance)
        elif act == 1:
            replace_file(folder, chance)
        elif act < 4 and (folder / ".metadata").is_file():
            change_item(folder, chance)
        else:
            path = chance.choice(files)
            acts: list[Callable[[bytes, Chance], bytes]] = [*BYTES]
            if path.suffix in (".json", ".jsonl"):
                acts += [change_json] * 8
            if path.name == ".metadata":
                acts += [change_metadata] * 8 + [craft_pickle] * 3
            content = path.read_bytes() if path.stat().st_size < 2**22 else b""
            path.write_bytes(chance.choice(acts)(content, chance))


class Fuzz:
    """Whole folders, and what they are read by."""

    def __init__(self, below: Path) -> None:
        self.below = below
        self.outcomes: Counter[str] = Counter()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        self.trainer = weft.Trainer(
            self.model, nn.functional.mse_loss, lambda params: torch.optim.Adam(params), hook="int8"
        )
        self.trainer.step(torch.ones(3, 4), torch.ones(3, 2))
        checkpoints = Checkpoints(below / "saved")
        checkpoints.save(self.trainer, {"rate": 1.0, "decay": 3})
        checkpoints.release()
        whole[:] = [(checkpoints.path_of(1) / ".metadata").read_bytes()]
        write_run(below / "run", ranks=2, steps=4, resumed=[2])
        machine = {
            "format": 2, "name": "m", "device": "cpu", "memory_bytes": 1e9, "flops_per_sec": 1e9,
            "memory_bytes_per_sec": 1e9, "op_secs": 0, "view_secs": 0, "work_factor": 1, "dtensor_secs": 0,
            "curves": {"mm": [[1, 1], [2, 2]]},
            "links": {
                "local": [1e9, 0], "between": [1e9, 0], "ranks_per_host": 8, "reads_peers": False,
                "overlap_cost": 0, "call_secs": 0, "curves": {},
            },
        }  # fmt: skip
        (below / "machine").mkdir()
        (below / "machine" / "machine.json").write_text(json.dumps(machine))
        sys.addaudithook(_listen)

    def run(self, seed: int) -> None:
        """One case; raises AssertionError where it ends as it must not."""
        chance = Chance(seed)
        kind, read = chance.choice(
            (("saved", self.load), ("saved", self.load), ("run", self.report), ("machine", self.plan))
        )
        folder = self.below / "case"
        shutil.copytree(self.below / kind, folder)
        try:
            damage(folder / "step-00000001" if kind == "saved" else folder, chance)
            began = time.process_time()
            outcome = read(folder)
            took = time.process_time() - began
        finally:
            shutil.rmtree(folder)
        assert not ran, f"it ran {ran}"
        assert took < MOST_SECS, f"it took {took:.1f} s"
        self.outcomes[f"{kind}: {outcome}"] += 1

    def load(self, folder: Path) -> str:
        checkpoints = Checkpoints(folder)
        before = [param.detach().clone() for param in self.model.parameters()]
        listed = _listing(folder)
        refused = _refused(lambda: (checkpoints.about(1), checkpoints.load(self.trainer, 1)))
        assert _listing(folder) == listed, "the folder has changed"
        params = [*self.model.parameters()]
        if refused is not None:
            assert str(folder) in refused, refused
            assert all(map(torch.equal, before, params)), "the model has changed"
            return "refused"
        for param, old in zip(self.model.parameters(), before, strict=True):
            param.data.copy_(old)  # what was read may be wrong numbers, which is nobody's fault here
        return "read"

    def report(self, folder: Path) -> str:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = weft_main(
                ["report", str(folder), "--trace", str(folder / "t.json"), "--tensorboard", str(folder / "t")]
            )
        if code == 0:
            assert not err.getvalue(), err.getvalue()
            return "read"
        assert code == 2, code
        assert err.getvalue().count("\n") == 1, err.getvalue()
        assert err.getvalue().startswith("weft report: "), err.getvalue()
        return "refused"

    def plan(self, folder: Path) -> str:
        machine: list[Any] = []
        if _refused(lambda: machine.append(load_profile(folder / "machine.json"))) is not None:
            return "refused"
        for curve in machine[0].curves.values():
            assert curve.secs(1.5) >= 0
        return "read"


def _refused(read: Callable[[], object]) -> str | None:
    """The one line with which a file is refused; None where it is read."""
    try:
        read()
    except ConfigError as error:
        line = str(error)
    else:
        return None
    assert "\n" not in line, line
    return line


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    return sorted(
        (str(path), status.st_size, status.st_mtime_ns)
        for path in folder.rglob("*")
        for status in (path.lstat(),)
    )


def run_cases(cases: int, seed: int, every: int = 0) -> Counter[str]:
    """Run this many cases; gives how many of each kind were read and refused."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        fuzz = Fuzz(Path(name))
        before = 0
        began = time.monotonic()
        for number in range(cases):
            try:
                fuzz.run(seed + number)
            except BaseException as error:
                error.add_note(f"case {number}: say it again with --cases 1 --seed {seed + number}")
                raise
            if number == WARM_UP:
                before = _peak_bytes()
            if every and number % every == every - 1:
                rate = (number + 1) / (time.monotonic() - began)
                print(f"{number + 1:,} of {cases:,} cases, {rate:.0f} a second, {_peak_bytes() >> 20} MiB")
        grown = _peak_bytes() - before
        assert cases <= WARM_UP or grown < GROWTH_BYTES, f"the process has grown by {grown >> 20} MiB"
        return fuzz.outcomes


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/file_fuzz", description="Fuzz the files that weft reads.")
    parser.add_argument("--cases", type=int, default=1000, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case (%(default)s)")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[attr-defined]
    for outcome, number in sorted(run_cases(options.cases, options.seed, every=500).items()):
        print(f"{outcome:18} {number:,}")


if __name__ == "__main__":
    main()
