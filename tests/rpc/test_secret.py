"""Secrets of workers: which are taken, where they come from, and that nobody gets to see them by accident."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
import traceback

import pytest

from weft import rpc, trust
from weft.errors import ConfigError, ConfigTypeError, TamperedError
from weft.rpc import secret as rpc_secret
from weft.rpc.options import resolve_options
from weft.rpc.secret import derive_keys, read_shared_secret, resolve_secret, strengthen_secret
from weft.trust import secret as trust_secret

PHRASE = "correct horse battery staple"


@pytest.fixture(autouse=True)
def without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_RPC_SECRET", raising=False)
    monkeypatch.delenv("WEFT_SECRET_FILE", raising=False)
    monkeypatch.setattr(rpc_secret, "_taken", None)
    monkeypatch.setattr(trust_secret, "_installed", None)


@pytest.mark.parametrize("weak", ["1", b"1", "a" * 64, "abcabcabcabcabcabcabcabc", "short one", ""])
def test_a_weak_secret_is_refused(weak: str | bytes) -> None:
    with pytest.raises(ConfigError, match=r"token_hex") as caught:
        rpc.TensorPipeRpcBackendOptions(secret=weak)
    assert "abcabc" not in str(caught.value)


def test_a_secret_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigTypeError, match="secret must be a str or bytes, not a int"):
        rpc.TensorPipeRpcBackendOptions(secret=123456789012345678)  # pyright: ignore[reportArgumentType]


def test_a_weak_secret_of_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_RPC_SECRET", "1")
    for _ in range(2):  # and it is not forgotten: the next try must not go without
        with pytest.raises(ConfigError, match="WEFT_RPC_SECRET"):
            resolve_secret(None)


@pytest.mark.processes
def test_the_variable_is_removed_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = secrets.token_hex()
    monkeypatch.setenv("WEFT_RPC_SECRET", given)
    assert resolve_secret(None) == strengthen_secret(given.encode())
    assert "WEFT_RPC_SECRET" not in os.environ
    inherited = subprocess.run(
        [sys.executable, "-c", "import os; print(dict(os.environ))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert given not in inherited.stdout
    # init_rpc may be called again, and the variable may be set again.
    assert resolve_secret(None) == strengthen_secret(given.encode())
    monkeypatch.setenv("WEFT_RPC_SECRET", PHRASE)
    assert resolve_secret(None) == strengthen_secret(PHRASE.encode())


def test_the_order_of_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_secret(None) is None
    job = trust.make_secret()
    trust.install_secret(job)
    assert resolve_secret(None) == job.derive_secret("rpc")
    monkeypatch.setenv("WEFT_RPC_SECRET", PHRASE)
    assert resolve_secret(None) == strengthen_secret(PHRASE.encode())
    assert resolve_secret("given " + PHRASE) == strengthen_secret(b"given " + PHRASE.encode())


def test_no_repr_shows_the_secret() -> None:
    given = secrets.token_hex()
    options = rpc.TensorPipeRpcBackendOptions(secret=given)
    resolved = resolve_options(options)
    assert resolved.secret is not None
    keys = derive_keys(resolved.secret)
    seen = " ".join(map(repr, (options, resolved, keys, resolved.secret)))
    for text in (given, keys.secret.decode(), keys.public.decode(), resolved.secret.reveal().hex()):
        assert text not in seen
    weak = PHRASE[:15]
    with pytest.raises(ConfigError) as caught:
        rpc.TensorPipeRpcBackendOptions(secret=weak)
    assert weak not in "".join(traceback.format_exception(caught.value))


def test_a_phrase_goes_through_scrypt_and_a_random_secret_does_not() -> None:
    def spend(text: bytes) -> float:
        strengthen_secret.cache_clear()
        began = time.process_time()
        strengthen_secret(text)
        return time.process_time() - began

    phrases = min(spend(PHRASE.encode() + bytes([65 + i])) for i in range(3))
    randoms = min(spend(secrets.token_hex().encode()) for _ in range(3))
    assert phrases > 100 * randoms
    strengthen_secret(PHRASE.encode())
    assert strengthen_secret(PHRASE.encode()) is strengthen_secret(PHRASE.encode())  # once in a process


def test_each_secret_has_keys_of_its_own() -> None:
    keys = {derive_keys(strengthen_secret(secrets.token_hex().encode())).public for _ in range(5)}
    assert len(keys) == 5


@pytest.mark.parametrize(
    "text",
    ["", "[]", "1", '{"host": "h"}', '{"host": "h", "place": 3}', "[" * 100_000, '{"host":1,"place":{}}'],
)
def test_a_malformed_location_is_refused(text: str) -> None:
    with pytest.raises(TamperedError, match="secret"):
        read_shared_secret(text)


@pytest.mark.parametrize("place", [[], [1], [1, 2], [1, 2, 3, 4], ["self", 3, 5], [[1], 2, 3], [True, 3, 5]])
def test_a_location_that_is_not_three_numbers_is_refused(place: list[object]) -> None:
    rpc_secret.share_own_secret()  # so that this process has one, as the first worker has
    with pytest.raises(TamperedError, match=r"secret|process id"):
        read_shared_secret(json.dumps({"host": rpc_secret.this_host(), "place": place}))


def test_a_location_of_another_host_or_of_a_dead_process() -> None:
    secret, place = rpc_secret.share_own_secret()
    assert read_shared_secret(place) == secret
    with pytest.raises(ConfigError, match="another host, or as another user"):
        read_shared_secret(place.replace(rpc_secret.this_host(), "elsewhere"))
    _, fd, inode = trust.expose_secret(secret)
    gone = place.replace(f"[{os.getpid()}, {fd}, {inode}]", f"[{(1 << 22) - 1}, {fd}, {inode}]")
    assert gone != place
    assert read_shared_secret(gone) is None
