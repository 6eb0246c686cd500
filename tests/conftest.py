"""What holds for every test: nothing is inherited from whoever started pytest, and GPU tests need a GPU.

A suite in the background (`nohup scripts/test &`), under torchrun, in a batch job or in CI runs as it does
in a terminal: signals do what they do by default, and variables that steer ranks and libraries are gone.
What tests start inherits that.
"""

from __future__ import annotations

import os
import signal

import hypothesis
import pytest

# Of launchers of ranks, of weft, and of what decides how libraries compute and talk.
STEERING = (
    "WEFT_",
    "TORCHELASTIC_",
    "GLOO_",
    "NCCL_",
    "TORCH_NCCL_",
    "OMP_",
    "MKL_",
    "GOMP_",
    "KMP_",
    "SLURM_",
)
STEERING_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_CPP_LOG_LEVEL"),
    *("PYTHONWARNINGS", "PYTHONUNBUFFERED", "PYTHONSAFEPATH", "COLUMNS", "NO_COLOR", "FORCE_COLOR"),
}
# Which library a test runs on and how often it is repeated: said by hand, to the tests themselves.
TOLD_TO_TESTS = ("WEFT_TEST_",)


def reset_signals() -> None:
    """Undo what a shell or nohup has ignored, and unblock all. A hangup alone stays as it was asked for."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def reset_environment() -> None:
    """Forget variables that would steer the ranks of tests, and masks that would hide their files."""
    for name in list(os.environ):
        if name in STEERING_NAMES or (name.startswith(STEERING) and not name.startswith(TOLD_TO_TESTS)):
            del os.environ[name]
    os.umask(0o022)


# Before anything is imported that reads them.
reset_signals()
reset_environment()
pytest_plugins = ["tests.ranks", "tests.tiers"]  # where tests run, and which
# A machine with a load of 15 takes longer than hypothesis's 200 ms for an example of a millisecond.
hypothesis.settings.register_profile("any load", deadline=None)
hypothesis.settings.load_profile("any load")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    # Imported here: tests/repo and the pure tests should not pay for torch.
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
