"""The secret of a job: 32 bytes that its ranks know and nobody else.

Sources: the launcher makes one and sends it over the control socket; else the file that WEFT_SECRET_FILE
names; else, among ranks of one host, the first rank exposes one to processes of its own user
(`expose_secret`), and the store in which the ranks meet holds only its location.

Invariant: its bytes are in no environment, argument list, repr, log, traceback or pickle. Only `reveal`
returns them, for the launcher's socket; everything else uses a key that `derive` makes for one purpose.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from weft.errors import ConfigError, StateError, TamperedError
from weft.trust.peer_memory import SEALS, open_memfd, seal_memory

SECRET_BYTES = 32
_MEMFD_NAME = "weft-secret"
_SECRET_SEALS = SEALS | 0x8  # F_SEAL_WRITE
_MAX_FILE_BYTES = 4096
_MOST_EXPOSED = 16  # of one process, which may be in as many worlds at a time
_MIN_DISTINCT_BYTES = 8  # of a secret in a file: one letter 32 times is long, but easy to guess


class JobSecret:
    """The secret of a job's ranks. Compares in constant time; can't be pickled or printed."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if type(key) is not bytes or len(key) != SECRET_BYTES:
            raise ConfigError(f"JobSecret: a secret is {SECRET_BYTES} bytes, as make_secret() makes them.")
        self._key = key

    def derive(self, purpose: str) -> bytes:
        """Return a key of 32 bytes for one purpose, from which neither the secret nor another key follows."""
        return hmac.digest(self._key, b"weft job secret\0" + purpose.encode(), "sha256")

    def derive_secret(self, purpose: str) -> JobSecret:
        """Return a secret for one scope, such as one job of a pool; it is void elsewhere."""
        return JobSecret(self.derive(f"secret/{purpose}"))

    def reveal(self) -> bytes:
        """Return the bytes, to be sent over a channel whose ends only this user's processes hold."""
        return self._key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobSecret) and hmac.compare_digest(self._key, other._key)

    def __hash__(self) -> int:
        return hash(self.derive("hash"))

    def __repr__(self) -> str:
        return "JobSecret(hidden)"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError("A JobSecret can't be pickled or copied: it must not leave its process by accident.")


def make_secret() -> JobSecret:
    """Make a new random secret."""
    return JobSecret(secrets.token_bytes(SECRET_BYTES))


# Process-wide: thread-ranks share one process and need no secret between them.
_installed: JobSecret | None = None
_exposed: dict[JobSecret, tuple[int, int, int]] = {}  # to its location, oldest first
_exposing = threading.Lock()


def install_secret(secret: JobSecret | None) -> None:
    """Set this process's secret; None removes it."""
    global _installed
    _installed = secret


def job_secret() -> JobSecret | None:
    """Return the secret of this process's job: installed, else WEFT_SECRET_FILE's; None without either."""
    if _installed is None:
        install_secret(given_secret())
    return _installed


# The last world of ranks that this process has joined. Keys of a group in its store are used again in the
# next world, and its values must be void there.
_world = ""


def enter_world(name: str) -> None:
    """Name the world of ranks that this process is in; all of them give it the same name."""
    global _world
    _world = name


def world_name() -> str:
    """Return the name of the world of ranks that this process is in; empty for one that weft did not make."""
    return _world


def given_secret() -> JobSecret | None:
    """Return the secret in the file that WEFT_SECRET_FILE names; None where it is not set.

    Raises ConfigError for a file that others could have read, written or put there.
    """
    path = os.environ.get("WEFT_SECRET_FILE")
    if not path:
        return None
    content = _read_private_file(path).strip()
    if len(content) < SECRET_BYTES or len(set(content)) < _MIN_DISTINCT_BYTES:
        raise _file_error(
            path, f"its content is too short or too regular: {SECRET_BYTES} random bytes or more are needed"
        )
    return JobSecret(hmac.digest(b"weft secret file", content, hashlib.sha256))


def _read_private_file(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise _file_error(path, f"it can't be opened, or is a link ({error.strerror})") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _file_error(path, "it is not a regular file")
        if status.st_uid != os.geteuid():
            raise _file_error(path, f"it belongs to user {status.st_uid}, and this is user {os.geteuid()}")
        if status.st_mode & 0o077:
            raise _file_error(path, f"other users may open it (mode {stat.S_IMODE(status.st_mode):04o})")
        content = os.read(fd, _MAX_FILE_BYTES + 1)
    finally:
        os.close(fd)
    if len(content) > _MAX_FILE_BYTES:
        raise _file_error(path, f"it is longer than {_MAX_FILE_BYTES} bytes")
    return content


def _file_error(path: str, problem: str) -> ConfigError:
    return ConfigError(
        f"WEFT_SECRET_FILE={path}: {problem}. Give every rank the same file, readable by you alone: "
        'umask 077; python -c "import secrets; print(secrets.token_hex())" > FILE'
    )


def expose_secret(secret: JobSecret) -> tuple[int, int, int]:
    """Let other processes of this user read the secret, as long as this process exposes few later ones.

    Returns its location (pid, descriptor, inode), which is not confidential: the kernel lets no other
    user open the descriptors of a process, and the memfd has no path.
    """
    with _exposing:
        for other, (pid, fd, _) in list(_exposed.items()):
            if pid != os.getpid():  # of the process that this one was forked from
                del _exposed[other]
            elif os.fstat(fd).st_uid != os.geteuid():  # of the user that this process was
                del _exposed[other]
                os.close(fd)
        if secret in _exposed:
            return _exposed[secret]
        fd = os.memfd_create(_MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(fd, 0o600)
        os.write(fd, secret.reveal())
        seal_memory(fd, _SECRET_SEALS)
        _exposed[secret] = os.getpid(), fd, os.fstat(fd).st_ino
        if len(_exposed) > _MOST_EXPOSED:  # ranks read it when they meet: it is long done
            _, oldest, _ = _exposed.pop(next(iter(_exposed)))
            os.close(oldest)
        return _exposed[secret]


def read_exposed_secret(place: Sequence[Any]) -> JobSecret:
    """Read the secret that another process of this user exposes; raises as open_peer_memory does."""
    if type(place) not in (list, tuple) or len(place) != 3:
        raise TamperedError(
            "the location of the job's secret must be a process id, a descriptor and an inode. The store has "
            "another value, which was not used: find out who else can write to it."
        )
    pid, fd, inode = place
    opened = open_memfd((pid, fd, inode), SECRET_BYTES, _MEMFD_NAME, _SECRET_SEALS, os.O_RDONLY)
    with os.fdopen(opened, "rb") as file:
        return JobSecret(file.read(SECRET_BYTES))
