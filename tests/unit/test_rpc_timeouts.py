"""Times that users give: numbers of seconds, finite, 0 or more; anything else is named."""

from __future__ import annotations

import math
from typing import Any

import pytest

from weft import rpc
from weft.errors import ConfigError, ConfigTypeError
from weft.rpc.options import check_secs, resolve_options

NO_NUMBERS = ["5", None, True, [1], b"1", 1j]
NO_TIMES = [math.inf, -math.inf, math.nan, -1, -0.5, 1e300, 10**400]


@pytest.mark.parametrize("secs", NO_NUMBERS, ids=repr)
def test_a_timeout_of_another_type_is_refused(secs: Any) -> None:
    with pytest.raises(ConfigTypeError, match=r"shutdown: timeout must be a number of seconds"):
        check_secs(secs, "shutdown: timeout")
    with pytest.raises(ConfigTypeError, match="rpc_timeout"):
        rpc.TensorPipeRpcBackendOptions(rpc_timeout=secs)


@pytest.mark.parametrize("secs", NO_TIMES, ids=lambda secs: str(secs)[:8])
def test_a_timeout_out_of_range_is_refused(secs: Any) -> None:
    with pytest.raises(ConfigError, match=r"rpc_timeout must be 0 \(none\) or more seconds"):
        rpc.TensorPipeRpcBackendOptions(rpc_timeout=secs)


@pytest.mark.parametrize("secs", [0, 0.0, 1, 2.5, 1e9])
def test_valid_timeouts_pass(secs: float) -> None:
    assert rpc.TensorPipeRpcBackendOptions(rpc_timeout=secs).rpc_timeout == secs
    assert type(check_secs(secs, "x")) is float


def test_an_option_that_is_set_later_is_checked_too() -> None:
    options = rpc.TensorPipeRpcBackendOptions()
    options.rpc_timeout = math.inf
    with pytest.raises(ConfigError, match="rpc_timeout"):
        resolve_options(options)


@pytest.mark.parametrize("name", ["num_worker_threads", "max_in_flight"])
def test_counts_are_ints(name: str) -> None:
    for value in ("5", 2.0, None):
        with pytest.raises(ConfigTypeError, match=name):
            rpc.TensorPipeRpcBackendOptions(**{name: value})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=name):
        rpc.TensorPipeRpcBackendOptions(**{name: 0})
