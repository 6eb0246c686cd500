"""What the reducer says when a gradient can't be right."""

from __future__ import annotations

from weft.errors import StateError


def came_twice(rank: int, name: str, *, is_skipped: bool, is_static: bool) -> StateError:
    """A parameter's gradient came after it had been taken for complete."""
    if is_static:
        return StateError(
            f"rank {rank}: Expected to mark a variable ready only once. Parameter '{name}' got more "
            "gradients than in the first step: the graph has changed, though static_graph=True promised "
            "that it wouldn't. Leave static_graph out."
        )
    if is_skipped:
        cause = (
            "find_unused_parameters=True took it for unused, since the graph of this backward didn't hold "
            "it: reentrant checkpointing hides what it recomputes. weft handles unused parameters without "
            "that flag"
        )
    else:
        cause = (
            "it got a gradient twice in one backward, as when a layer is used in two reentrant checkpoints, "
            "or backward ran through the module in parts"
        )
    return StateError(
        f"rank {rank}: Expected to mark a variable ready only once. Parameter '{name}': {cause}. Use "
        "torch.utils.checkpoint with use_reentrant=False, or static_graph=True if the graph is the same in "
        "every step."
    )


def came_unannounced(rank: int) -> StateError:
    """Gradients came in a backward that nobody noticed in time."""
    return StateError(
        f"rank {rank}: the last backward brought gradients but did not come through the outputs of forward, "
        "as those before it did, and they were not reduced. Make the loss from what forward returns, in "
        "every step."
    )


def came_after_failure(rank: int) -> StateError:
    """A backward failed and the next one can't be told from it."""
    return StateError(
        f"rank {rank}: a backward that failed was followed by another without a forward in between. Run "
        "forward again."
    )


def unexpected_words(rank: int, name: str) -> str:
    """What is said of a backward without a forward of the wrapped module."""
    return (
        f"rank {rank}: parameter '{name}' got a gradient in a backward that no forward of the wrapped module "
        "led to: the module inside was called itself, or one forward has several backwards that don't come "
        "through its outputs. Such gradients stay local until the next reduction. Call the wrapped module."
    )


def is_shared(rank: int, name: str) -> StateError:
    """Two reducers are at work on one parameter."""
    return StateError(
        f"rank {rank}: parameter '{name}' is reduced by two modules in one backward, which share some "
        "parameters and not all. Wrap it once: replicate children before their parent, which leaves them out."
    )
