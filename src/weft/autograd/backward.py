"""Ask autograd's engine about the backward under way.

The private names of torch that weft needs for this are used here and nowhere else:
`_current_graph_task_id`, `_current_autograd_node`, `_will_engine_execute_node`,
`_unsafe_preserve_version_counter`, `_unsafe_set_version_counter`, nodes' `_sequence_nr` and
`_set_sequence_nr`, and the engine's `queue_callback` and `run_backward`. Tensors' `_backward_hooks` are
looked at elsewhere too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

# Of the nodes that are ready the engine takes the one with the largest number. Those of leaves have more.
_FIRST, _SOON = 2**62, 2**61


def current_backward() -> int | None:
    """A number for the backward that runs on this thread now; None outside of any.

    A backward within a backward (reentrant checkpointing) has a number of its own.
    """
    number = torch._C._current_graph_task_id()
    return None if number < 0 else number


def on_backward_end(callback: Callable[[], None]) -> None:
    """Call back when the backward under way has computed everything; not if it fails.

    The callback is kept by that backward alone, so a weak reference to it tells
    whether the backward is still going on. What it raises comes out of `backward()`.
    """
    engine: Any = Variable._execution_engine
    engine.queue_callback(callback)


def current_node() -> Any:
    """The node of the graph that the backward on this thread is at; None where it doesn't say."""
    return torch._C._current_autograd_node()


def run_first(node: Any) -> None:
    """Let the engine come to a node before all others that are ready, but for leaves'."""
    node._set_sequence_nr(_FIRST)


def run_soon(node: Any) -> None:
    """Let the engine come to a node before others that are ready, but for leaves' and the first.

    Of several such nodes it comes to the latest first, as of others.
    """
    node._set_sequence_nr(_SOON + node._sequence_nr())


def run_last(last: Sequence[Any], others: Iterable[Any]) -> None:
    """Let the engine come to nodes when none of the others is ready, and to the last of them first."""
    num_last = len(last)
    for node in others:
        if node._sequence_nr() < num_last:  # among the first that its thread has made
            node._set_sequence_nr(num_last)
    for place, node in enumerate(last):
        node._set_sequence_nr(place)


def run_engine(
    roots: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    edges: Sequence[GradientEdge],
    edge_gradients: Sequence[torch.Tensor],
    *,
    retain_graph: bool,
) -> None:
    """Run a backward, as torch.autograd.backward, from tensors and from edges of the graph.

    Its checks of roots and gradients take longer than a small graph does. They are left out where they can't
    find anything: where all roots are plain real scalars. Those of edges are the engine's own.
    """
    starts: list[torch.Tensor] = []
    for root, start in zip(roots, gradients, strict=True):
        if not _is_plain_start(root, start):
            break
        starts.append(torch.ones_like(root) if start is None else start)
    if len(starts) == len(roots):
        engine: Any = Variable._execution_engine
        engine.run_backward(
            (*roots, *edges),
            (*starts, *edge_gradients),
            keep_graph=retain_graph,
            create_graph=False,
            inputs=(),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    else:
        everything: Any = [*roots, *edges]
        torch.autograd.backward(everything, [*gradients, *edge_gradients], retain_graph=retain_graph)


def _is_plain_start(root: torch.Tensor, start: torch.Tensor | None) -> bool:
    is_plain = type(root) is torch.Tensor and not root.ndim and root.dtype.is_floating_point
    return is_plain and (start is None or (not start.ndim and start.dtype is root.dtype))


def has_hooks(node: Any) -> bool:
    """Whether somebody has registered hooks on a node, in Python. torch tells who registers one more."""
    for register in (node.register_prehook, node.register_hook):
        handle = register(_pass)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def has_tensor_hooks(tensor: torch.Tensor) -> bool:
    """Whether a tensor has hooks that see its gradient."""
    return bool(tensor._backward_hooks)


def _pass(*_: Any) -> None:
    """A hook that does nothing."""


def is_reachable(roots: Iterable[Any], wanted: Iterable[Any]) -> bool:
    """Whether the graph below one of the roots has one of the wanted nodes."""
    targets = set(wanted)
    seen: set[Any] = set()
    pending = [root for root in roots if root is not None]
    while pending:
        node = pending.pop()
        if node in targets:
            return True
        if node not in seen:
            seen.add(node)
            pending += [following for following, _ in node.next_functions if following is not None]
    return False


def unseen_by_autograd(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Let tensors be written without their versions going up, so that graphs which hold them stay valid."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))  # type: ignore[reportPrivateImportUsage]


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Say which version tensors are at. A backward that needs an earlier one raises."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))  # type: ignore[attr-defined]


def accumulation_node(parameter: torch.Tensor) -> Any:
    """The node of the graph that adds to the parameter's `.grad`."""
    with torch.enable_grad():
        return torch.autograd.graph.get_gradient_edge(parameter).node


def will_run(node: Any) -> bool:
    """Whether the backward under way will come to this node of the graph.

    False as well for a leaf whose gradient `torch.autograd.grad` has been asked for:
    it is returned, and nothing is added to `.grad`.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        if "autograd.grad" in str(error):
            return False
        raise
