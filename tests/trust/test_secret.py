"""The job's secret: it is strong, it is found, and it shows nowhere."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.errors import ConfigError, StateError, TamperedError, WeftError
from weft.trust import (
    JobSecret,
    expose_secret,
    given_secret,
    install_secret,
    job_secret,
    make_secret,
    read_exposed_secret,
)


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = job_secret()
    monkeypatch.delenv("WEFT_SECRET_FILE", raising=False)
    install_secret(None)
    yield
    install_secret(before)


def write_secret(path: Path, content: str = "0123456789abcdef" * 4, mode: int = 0o600) -> Path:
    path.write_text(content)
    path.chmod(mode)
    return path


def test_secrets_differ_and_so_do_the_keys_of_two_purposes() -> None:
    secret = make_secret()
    assert secret != make_secret()
    assert secret == JobSecret(secret.reveal())
    keys = {secret.derive("a"), secret.derive("b"), secret.derive_secret("a").derive("a"), secret.reveal()}
    assert len(keys) == 4
    assert secret.derive("a") == JobSecret(secret.reveal()).derive("a")


def test_it_shows_in_no_repr_and_no_traceback() -> None:
    secret = make_secret()
    shown = [repr(secret), str(secret), f"{secret}"]
    try:
        raise ValueError(secret)
    except ValueError as error:
        lines = traceback.TracebackException.from_exception(error, capture_locals=True).format()
        shown.append("".join(lines))
    for text in shown:
        assert secret.reveal().hex() not in text
        assert repr(secret.reveal())[2:-1] not in text


@pytest.mark.parametrize("leak", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_can_not_be_pickled_or_copied(leak: object) -> None:
    with pytest.raises(StateError, match="can't be pickled"):
        leak(make_secret())  # type: ignore[operator]


@pytest.mark.parametrize("key", [b"", b"x" * 31, b"x" * 33, "x" * 32, None, bytearray(32)])
def test_it_is_32_bytes(key: object) -> None:
    with pytest.raises(ConfigError, match="32 bytes"):
        JobSecret(key)  # type: ignore[arg-type]


def test_a_process_has_none_until_one_is_installed() -> None:
    assert job_secret() is None
    secret = make_secret()
    install_secret(secret)
    assert job_secret() is secret


def test_the_file_that_is_named_gives_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_SECRET_FILE", str(write_secret(tmp_path / "a")))
    first = given_secret()
    assert first is not None
    assert job_secret() == first
    # A line's end is no part of it: editors and echo add one.
    monkeypatch.setenv("WEFT_SECRET_FILE", str(write_secret(tmp_path / "b", "0123456789abcdef" * 4 + "\n")))
    assert given_secret() == first
    monkeypatch.setenv("WEFT_SECRET_FILE", str(write_secret(tmp_path / "c", "1123456789abcdef" * 4)))
    assert given_secret() != first


def test_a_file_that_others_could_have_touched_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = write_secret(tmp_path / "good")
    link = tmp_path / "link"
    link.symlink_to(good)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    cases = {
        link: "is a link",
        pipe: "not a regular file",
        tmp_path: "not a regular file",
        tmp_path / "none": "can't be opened",
        write_secret(tmp_path / "group", mode=0o640): "other users may open it",
        write_secret(tmp_path / "all", mode=0o604): "other users may open it",
        write_secret(tmp_path / "short", "0123456789abcdef"): "too short",
        write_secret(tmp_path / "same", "a" * 64): "too short",
        write_secret(tmp_path / "blank", " " * 64): "too short",
        write_secret(tmp_path / "long", "0123456789abcdef" * 1000): "longer than",
    }
    for path, problem in cases.items():
        monkeypatch.setenv("WEFT_SECRET_FILE", str(path))
        with pytest.raises(ConfigError, match=problem) as caught:
            given_secret()
        assert "0123456789" not in str(caught.value)


_READER = """
import json, sys
from weft.trust import read_exposed_secret
print(read_exposed_secret(json.loads(sys.argv[1])).derive("test").hex())
"""


@pytest.mark.processes
def test_another_process_of_this_user_reads_what_is_exposed() -> None:
    secret = make_secret()
    place = expose_secret(secret)
    assert expose_secret(secret) == place  # one memfd a secret
    done = subprocess.run(
        [sys.executable, "-c", _READER, str(list(place))], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == secret.derive("test").hex()
    assert read_exposed_secret(list(place)) == secret
    with pytest.raises(PermissionError):
        os.write(place[1], b"other")


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_not_read_what_is_exposed() -> None:
    place = expose_secret(make_secret())
    code = (
        "import os, sys\nos.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        f"try:\n    os.open('/proc/{place[0]}/fd/{place[1]}', os.O_RDONLY)\n"
        "except PermissionError:\n    sys.exit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 3


@pytest.mark.parametrize(
    "place",
    [
        None,
        "12",
        {},
        [],
        [1, 2],
        ["self", 3, 4],
        [os.getpid(), "../../../tmp/evil", 4],
        [True, 3, 4],
        [1.0, 3, 4],
        [-1, 3, 4],
        [0, 3, 4],
        [1 << 70, 3, 4],
        [os.getpid(), -1, 4],
    ],
)
def test_a_place_of_other_types_is_refused(place: object) -> None:
    with pytest.raises(TamperedError):
        read_exposed_secret(place)  # type: ignore[arg-type]


def test_a_place_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    pid, fd, inode = expose_secret(make_secret())
    with open(write_secret(tmp_path / "evil", "x" * 32)) as evil:
        status = os.fstat(evil.fileno())
        with pytest.raises(OSError, match="not shared memory of weft"):
            read_exposed_secret([pid, evil.fileno(), status.st_ino])
    with pytest.raises(OSError, match="has been replaced"):
        read_exposed_secret([pid, fd, inode + 1])
    with pytest.raises((OSError, WeftError)):
        read_exposed_secret([1 if os.geteuid() else 4194303, fd, inode])


def test_few_descriptors_stay_open_for_many_secrets() -> None:
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    made = [make_secret() for _ in range(40)]
    places = [expose_secret(secret) for secret in made]
    before = num_open()
    places = [expose_secret(secret) for secret in made]
    assert num_open() == before
    assert read_exposed_secret(places[-1]) == made[-1]
    assert expose_secret(made[-1]) == places[-1]
    with pytest.raises((OSError, TamperedError)):  # long done with
        read_exposed_secret(places[0])
