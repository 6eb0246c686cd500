"""The secret that lets a worker in, and the keys made from it.

Every worker makes the same CURVE key pair from the secret. A peer must know the public key to begin the
handshake and hold the secret one to end it, so whoever lacks the secret never gets a message through.

Where the secret comes from: the options or WEFT_RPC_SECRET (the launcher sets it); else, among workers
of one host, a file that only this user can read, made by the first worker. The store that workers meet at
only names the file: whoever can read the store learns nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import tempfile
from dataclasses import dataclass

import zmq
import zmq.utils.z85

from weft.errors import ConfigError

_PREFIX = "weft-rpc-"
_SECRET = re.compile(rb"[0-9a-f]{64}")


@dataclass(frozen=True)
class Keys:
    """A CURVE key pair, as zmq takes it."""

    public: bytes
    secret: bytes


def derive_keys(secret: bytes) -> Keys:
    """The key pair that a secret stands for. Pure."""
    if not secret:
        raise ConfigError(
            "weft.rpc: the secret is empty. Use a long random one, such as secrets.token_hex()."
        )
    key = zmq.utils.z85.encode(hashlib.blake2b(secret, digest_size=32, person=b"weft.rpc curve").digest())
    return Keys(zmq.curve_public(key), key)


def make_secret() -> bytes:
    """A new secret."""
    return secrets.token_hex(32).encode()


def write_secret_file(secret: bytes) -> str:
    """Put a secret where only processes of this user can read it. The caller removes the file."""
    fd, path = tempfile.mkstemp(prefix=_PREFIX)  # mode 0600
    with os.fdopen(fd, "wb") as file:
        file.write(secret)
    return path


def read_secret_file(path: str) -> bytes:
    """Read a secret that a process of this user wrote. Raises ConfigError for any other file.

    The path comes from a store that others may write to: it must not lead to a file whose content they know.
    """
    advice = "Give every worker the same secret: WEFT_RPC_SECRET, or the option secret=."
    folder, name = os.path.split(path)
    if folder != tempfile.gettempdir() or not name.startswith(_PREFIX):
        raise ConfigError(
            f"init_rpc: the first worker's secret is not where this worker keeps temporary files. {advice}"
        )
    try:
        # A stranger may name a pipe, which would block, or a link to another file.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"init_rpc: the secret of the first worker can't be read here ({error.strerror}): it runs on "
            f"another host, or as another user. {advice}"
        ) from error
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        is_private = status.st_uid == os.getuid() and not status.st_mode & 0o077 and status.st_nlink == 1
        secret = file.read(65) if stat.S_ISREG(status.st_mode) and is_private else b""
    if not _SECRET.fullmatch(secret):
        raise ConfigError(
            f"init_rpc: the file with the secret is not one that a worker of this user wrote. {advice}"
        )
    return secret
