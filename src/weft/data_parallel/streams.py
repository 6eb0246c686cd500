"""On which CUDA streams the gradients of a backward come, and how a bucket waits for all of them.

autograd adds up a parameter's gradient on the stream where forward first used the parameter. Where a
forward works on several streams, the gradients of one bucket come on several, while the bucket is
collected on that of the last one to come. Only parameters that call back are heard of here, so where
there are several streams all of them must.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch


class GradStreams:
    """The streams of one backward, by device."""

    def __init__(self) -> None:
        self._seen: dict[torch.device, list[torch.cuda.Stream]] = {}

    def note(self, param: torch.Tensor) -> None:
        """This parameter's gradient has come on the current stream."""
        if param.is_cuda:
            streams = self._seen.setdefault(param.device, [])
            stream = torch.cuda.current_stream(param.device)
            if stream not in streams:
                streams.append(stream)

    @property
    def are_several(self) -> bool:
        """Whether gradients of one device have come on different streams."""
        return any(len(streams) > 1 for streams in self._seen.values())

    @contextmanager
    def joined(self, device: torch.device) -> Generator[None]:
        """Work within comes after what the streams hold, and before what they are given next.

        The latter because memory of gradients that are dropped within is free for those streams at once.
        """
        if device not in self._seen:
            yield
            return
        here = torch.cuda.current_stream(device)
        others = [stream for stream in self._seen[device] if stream != here]
        for stream in others:
            here.wait_stream(stream)
        yield
        for stream in others:
            stream.wait_stream(here)
