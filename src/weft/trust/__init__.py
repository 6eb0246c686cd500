"""Trust between ranks: the job's secret, store values sealed with it, peers' memory opened by descriptor."""

from weft.trust.numbers import check_integer
from weft.trust.peer_memory import MAX_PID, MEMORY_NAME, SEALS, check_process, open_peer_memory, seal_memory
from weft.trust.sealed_store import MAX_VALUE_BYTES, KeyValueStore, SealedStore, next_turn
from weft.trust.secret import (
    JobSecret,
    enter_world,
    expose_secret,
    given_secret,
    install_secret,
    job_secret,
    make_secret,
    read_exposed_secret,
    world_name,
)
from weft.trust.sharing import SECRET_KEY, address_of, share_secret

__all__ = [
    "MAX_PID",
    "MAX_VALUE_BYTES",
    "MEMORY_NAME",
    "SEALS",
    "SECRET_KEY",
    "JobSecret",
    "KeyValueStore",
    "SealedStore",
    "address_of",
    "check_integer",
    "check_process",
    "enter_world",
    "expose_secret",
    "given_secret",
    "install_secret",
    "job_secret",
    "make_secret",
    "next_turn",
    "open_peer_memory",
    "read_exposed_secret",
    "seal_memory",
    "share_secret",
    "world_name",
]
