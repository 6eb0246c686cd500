"""Gradients on their way between workers: side by side, and by number again."""

from __future__ import annotations

import torch

from weft.dist_autograd.messages import Batch, flatten_batch, read_batch


def test_a_batch_is_the_same_on_the_other_side() -> None:
    grads = [torch.full((2,), float(number)) for number in range(3)]
    batch: Batch = [(7, (grads[0], None)), (3, ()), (9, (grads[1], grads[2]))]
    found = read_batch(flatten_batch(batch))
    assert [(number, [id(grad) for grad in tensors]) for number, tensors in found] == [
        (number, [id(grad) for grad in tensors]) for number, tensors in batch
    ]


def test_one_that_came_for_several_is_each_ones_own() -> None:
    grad, other = torch.ones(2), torch.zeros(2)
    found = dict(read_batch(flatten_batch([(1, (grad, grad)), (2, (None, grad, other, None))])))
    tensors = [tensor for grads in found.values() for tensor in grads if tensor is not None]
    assert [tensor.tolist() for tensor in tensors] == [[1.0, 1.0]] * 3 + [[0.0, 0.0]]
    assert len({tensor.data_ptr() for tensor in tensors}) == 4
    assert found[2][0] is None
    assert found[2][3] is None
    assert tensors[3] is other
