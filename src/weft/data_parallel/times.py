"""When the parts of a step began and ended, for those who look where the time goes."""

from __future__ import annotations

import time


class StepTimes:
    """Nanoseconds of the last step, as `_get_ddp_logging_data` reports them."""

    def __init__(self) -> None:
        self._marks: dict[str, int] = {}
        self._sums: dict[str, int] = {}
        self._num_steps = 0

    def forward_begins(self) -> None:
        """A forward that will be reduced starts."""
        self._marks["forward_start"] = time.time_ns()

    def backward_begins(self) -> None:
        """The first sign of backward."""
        self._marks["backward_start"] = time.time_ns()

    def communication_begins(self) -> None:
        """The first bucket goes."""
        self._marks["comm_start"] = time.time_ns()

    def backward_ends(self) -> None:
        """All gradients are there."""
        self._marks["backward_end"] = time.time_ns()

    def communication_ends(self) -> None:
        """All means are there."""
        self._marks["comm_end"] = time.time_ns()
        self._num_steps += 1
        for name, value in self.durations().items():
            self._sums[name] = self._sums.get(name, 0) + value

    def durations(self) -> dict[str, int]:
        """How long each part took in the last step."""
        marks = self._marks
        if not {"comm_end", "forward_start", "backward_start", "backward_end", "comm_start"} <= marks.keys():
            return {}  # a rank without inputs makes no step of its own
        overlap = max(0, marks["backward_end"] - marks["comm_start"])
        return {
            "forward_compute_time": marks["backward_start"] - marks["forward_start"],
            "backward_compute_time": marks["backward_end"] - marks["backward_start"],
            "backward_comm_time": marks["comm_end"] - marks["comm_start"],
            "backward_compute_comm_overlap_time": overlap,
        }

    def report(self) -> dict[str, int]:
        """The last step, the mean over all, and the moments of the last step."""
        marks = self._marks
        means = {f"avg_{name}": total // max(self._num_steps, 1) for name, total in self._sums.items()}
        moments = {
            f"{name}_time_{end}": marks[f"{mark}_{end}"]
            for name, mark, end in (
                ("forward_compute", "forward", "start"),
                ("backward_compute", "backward", "start"),
                ("backward_compute", "backward", "end"),
                ("backward_comm", "comm", "start"),
                ("backward_comm", "comm", "end"),
            )
            if f"{mark}_{end}" in marks
        }
        return {**self.durations(), **means, **moments}
