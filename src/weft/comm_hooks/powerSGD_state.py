"""What PowerSGD knows between steps: options, factors of the last step, errors to make good."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch.distributed import ProcessGroup

from weft.comm_hooks.bucket import GradBucket
from weft.comm_hooks.saved import GroupFreePickle
from weft.errors import ConfigError

logger = logging.getLogger(__name__)


class PowerSGDState(GroupFreePickle):
    """Options and memory of `powerSGD_hook` and `batched_powerSGD_hook`.

    `matrix_approximation_rank`: how many columns the factors have; 1 to 4 as a rule. More, less error.
    `start_powerSGD_iter`: plain means for so many steps, while gradients change fast. A tenth of the run
    is a good start; at least 2 where anything is remembered, since buckets are planned anew after the first.
    `min_compression_rate`: tensors that would not get so many times smaller travel as they are.
    `use_error_feedback`: add what a step left out to the next. Without it training may not converge.
    `warm_start`: begin from the factors of the step before, which makes them better step by step.
    `orthogonalization_epsilon`: added to the length of columns before dividing by it.
    `random_seed`: of the first factors; the same on every rank.
    `compression_stats_logging_frequency`: log what was saved every so many steps.
    `batch_tensors_with_same_shape`: one matrix product for all gradients of a shape in a bucket.

    It pickles without its process group. `state_dict` holds only tensors and numbers.
    """

    __slots__ = [  # noqa: RUF023  (options first, as torch has them)
        "process_group",
        "matrix_approximation_rank",
        "start_powerSGD_iter",
        "min_compression_rate",
        "orthogonalization_epsilon",
        "use_error_feedback",
        "warm_start",
        "batch_tensors_with_same_shape",
        "rng",
        "error_dict",
        "p_memory_dict",
        "q_memory_dict",
        "iter",
        "total_numel_before_compression",
        "total_numel_after_compression",
        "compression_stats_logging_frequency",
        "next_stats_report",
    ]

    def __init__(
        self,
        process_group: ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        if (use_error_feedback or warm_start) and start_powerSGD_iter <= 1:
            raise ConfigError(
                "Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, "
                "because PowerSGD can only be applied after the first two iterations in DDP."
            )
        if matrix_approximation_rank < 1:
            raise ConfigError(
                "PowerSGDState: matrix_approximation_rank must be at least 1; "
                f"got {matrix_approximation_rank}."
            )
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        # Seeds of first factors. Every rank draws the same, and other ones in every step.
        self.rng = np.random.RandomState(random_seed)
        # By the bucket's index, 1D: errors; what the first and the second all-reduce carry.
        self.error_dict: dict[int, torch.Tensor] = {}
        self.p_memory_dict: dict[int, torch.Tensor] = {}
        self.q_memory_dict: dict[int, torch.Tensor] = {}
        self.iter = 0
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.next_stats_report = 0

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to go on as if nothing had happened. Each rank has its own errors."""
        _, keys, position, _, _ = self.rng.get_state(legacy=True)
        return {
            "iter": self.iter,
            "errors": dict(self.error_dict),
            "qs": dict(self.q_memory_dict),
            "rng_keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "rng_position": int(position),
            "totals": (self.total_numel_before_compression, self.total_numel_after_compression),
            "next_stats_report": self.next_stats_report,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what was saved; the options stay as they were given."""
        self.iter = state_dict["iter"]
        self.error_dict = {index: error.clone() for index, error in state_dict["errors"].items()}
        self.q_memory_dict = {index: q.clone() for index, q in state_dict["qs"].items()}
        self.p_memory_dict = {}
        keys = state_dict["rng_keys"].cpu().numpy().astype(np.uint32)
        self.rng.set_state(("MT19937", keys, state_dict["rng_position"], 0, 0.0))
        self.total_numel_before_compression, self.total_numel_after_compression = state_dict["totals"]
        self.next_stats_report = state_dict["next_stats_report"]

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a step when its last bucket comes."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_powerSGD_iter:
                logger.info("PowerSGD compresses from now on, after %s steps.", self.iter)

    def compression_stats(self) -> tuple[float, int, int]:
        """How many times smaller gradients were made, and their numbers before and after."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return before / after if after > 0 else 0, before, after

    def count(self, bucket: GradBucket, numel_before: int, numel_after: int) -> None:
        """Count what was sent for a bucket, and log it now and then."""
        self.total_numel_before_compression += numel_before
        self.total_numel_after_compression += numel_after
        if bucket.is_last() and self.iter >= self.next_stats_report:
            rate, before, after = self.compression_stats()
            logger.info("PowerSGD, step %s: %s numbers sent for %s, rate %s", self.iter, after, before, rate)
            self.next_stats_report = self.iter + self.compression_stats_logging_frequency

    def with_error(self, bucket: GradBucket, numel: int) -> torch.Tensor:
        """The gradients and the error of the step before, in `numel` numbers whose rest is zero.

        With error feedback this is the memory where the new error will be.
        """
        buffer = bucket.buffer()
        if not self.use_error_feedback:
            return buffer if numel == buffer.numel() else _padded(buffer, numel)
        error = self.error_dict.get(bucket.index())
        if error is None or error.numel() != numel or error.dtype != buffer.dtype:
            error = buffer.new_zeros(numel)
        error = self.error_dict[bucket.index()] = error.to(buffer.device)
        error[: buffer.numel()].add_(buffer)
        return error


def _padded(buffer: torch.Tensor, numel: int) -> torch.Tensor:
    padded = buffer.new_zeros(numel)
    padded[: buffer.numel()] = buffer
    return padded
