"""On a GPU the engine has threads of its own: a backward tells its number before anything in it can wait."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from weft.autograd import run_last
from weft.dist_autograd import running


def test_a_backward_tells_its_number_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    seen: list[tuple[int, int]] = []

    def make_ready() -> None:
        # A new thread numbers its nodes from 0 on, as sends that wait are numbered.
        token = torch.zeros((), requires_grad=True).exp()
        run_last([token.grad_fn], [])
        run: Any = object()
        with running.at_work(run) as roots:
            (root,) = roots
            assert root.grad_fn is not None
            seen.append((root.grad_fn._sequence_nr(), token.grad_fn._sequence_nr()))  # type: ignore[union-attr]

    thread = threading.Thread(target=make_ready)
    thread.start()
    thread.join()
    ((first, waiting),) = seen
    assert first > waiting
    assert first > 2**60  # more than any thread has numbered
