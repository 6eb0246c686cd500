"""The word STEP of one step, under way: the number of active ranks, once all have spoken.

On a GPU the number is read beside the computation: waiting for it must not wait for
what the rank has queued on its stream since.
"""

from __future__ import annotations

import torch

from weft.comm import Handle


class Notice(Handle[torch.Tensor]):
    """A Handle whose result holds how many ranks make this step. Nobody has to wait for it."""

    __slots__ = ("_host_word", "_parent", "_ready")

    def __init__(self, parent: Handle[torch.Tensor], device: torch.device) -> None:
        super().__init__((), None)  # type: ignore[arg-type]
        self._parent = parent
        self._ready: torch.cuda.Event | None = None
        if device.type == "cuda":
            # The copy is ordered behind the collective here, on a stream of its own, so that either
            # kind of wait, of a stream or of the host, is for this event and for nothing else.
            stream = _side_stream(device)
            with torch.cuda.stream(stream):
                word = parent.wait()
                word.record_stream(stream)
                self._host_word = word.to("cpu", non_blocking=True)
                self._ready = torch.cuda.Event()
                self._ready.record(stream)

    def _wait(self, timeout: float | None) -> None:
        self._result = self._parent.wait(timeout)
        if self._ready is None:
            self._is_waited = True  # on a GPU each stream that asks is ordered anew
        else:
            torch.cuda.current_stream(self._result.device).wait_event(self._ready)

    def read(self) -> int:
        """The sum of the ranks' words, on the host."""
        if self._ready is None:
            return int(self._parent.wait().item())
        self._ready.synchronize()
        return int(self._host_word.item())

    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._parent.is_done()

    def _is_missed(self) -> bool:
        return False  # whoever made it reads it


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    stream = _side_streams.get(device)
    if stream is None:
        stream = _side_streams[device] = torch.cuda.Stream(device)
    return stream
