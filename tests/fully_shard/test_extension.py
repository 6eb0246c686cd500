"""Tensor subclasses that say how they are gathered; parameters that begin on the meta device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils import _pytree

from tests.fully_shard.models import WIDTH, Language, as_whole, by_layer, make_tokens, net, next_token_loss
from tests.fully_shard.twins import Twin, assert_is_shard, make_rows, part_of
from tests.ranks import run_on
from weft import MixedPrecisionPolicy, fully_shard

pytestmark = run_on(threads=(2, 4))

BF16 = torch.bfloat16


class Wrapped(torch.Tensor):
    """A tensor around another, as one that is quantized would be."""

    calls: list[str]  # of the gather's two ends, by all ranks

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner: Any = inner  # torch.Tensor has a method of that name

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        args, kwargs = _pytree.tree_map_only(cls, lambda tensor: tensor.inner, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return _pytree.tree_map_only(torch.Tensor, cls, out)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, outer_size, outer_stride) -> Wrapped:
        return cls(inner["inner"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner})"


class Narrow(Wrapped):
    """Travels in bfloat16."""

    calls: list[str] = []  # noqa: RUF012  (all instances count together)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """What is gathered, and what the other end needs to know of it."""
        assert mesh.size() > 1
        assert tuple(outer_size)[1:] == tuple(self.inner.shape)[1:]
        assert isinstance(module, nn.Linear)
        assert isinstance(mp_policy, MixedPrecisionPolicy)
        self.calls.append("pre")
        return (self.inner.to(BF16),), "what the other end needs"

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The full parameter from what was gathered; into `out` from the second time on."""
        assert metadata == "what the other end needs"
        (gathered,) = all_gather_outputs
        assert gathered.dtype == BF16
        self.calls.append("post")
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(gathered)
            return None
        wide = gathered.to(param_dtype)
        return wide, (gathered, wide)


class InTwoParts(Wrapped):
    """Travels as its bfloat16 part and the rest."""

    calls: list[str] = []  # noqa: RUF012

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
        """The older signature."""
        self.calls.append("pre")
        large = self.inner.to(BF16)
        return (large, self.inner - large.to(self.inner.dtype)), None

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        """Both together."""
        self.calls.append("post")
        large, rest = all_gather_outputs
        assert (large.dtype, rest.dtype) == (BF16, self.inner.dtype)
        whole = large.to(rest.dtype) + rest
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(whole)
            return None
        return whole, (large, rest, whole)


def subclasses(kind: type[Wrapped]) -> None:
    """Sizes that divide evenly; weights that bfloat16 holds, so that the plain model is the reference."""
    model = net(width=8)
    for param in model.parameters():
        param.data.copy_(param.data.to(BF16).to(param.dtype))
    single = copy.deepcopy(model)
    for layer in (model[0], model[2], model[4]):
        layer.weight = nn.Parameter(kind(layer.weight.detach().clone()))
    kind.calls.clear()
    by_layer(model, reshard_after_forward=True)
    for step in range(2):
        rows = make_rows(step, width=8)
        for each in (model, single):
            each.zero_grad()
            each(rows).square().mean().backward()
        for (name, param), right in zip(model.named_parameters(), single.named_parameters(), strict=True):
            assert isinstance(param, DTensor), name
            grad = param.grad
            assert_is_plain_shard(grad, right[1].grad, name)
    assert kind.calls.count("pre") >= 6
    assert kind.calls.count("post") >= 6


def assert_is_plain_shard(grad: Any, right: torch.Tensor, name: str) -> None:
    local = grad.to_local()
    local = local.inner if isinstance(local, Wrapped) else local
    wanted = part_of(right, grad)
    assert (local - wanted).abs().max() <= 1e-12 * right.abs().max(), name


def test_narrow_gathers() -> None:
    subclasses(Narrow)


def test_gathers_in_two_parts() -> None:
    subclasses(InTwoParts)


def set_by_hand(local: torch.Tensor, seen: list[Any]) -> None:
    """Both methods on one tensor, which travels in bfloat16; `seen` gets the arguments of the first."""

    def pre(
        self: torch.Tensor,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        assert self is local
        seen.append((mesh.ndim, mesh.size(), tuple(outer_size), outer_stride, module, mp_policy))
        return (self.to(BF16),), "told"

    def post(
        self: torch.Tensor,
        outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        assert (metadata, outputs[0].dtype) == ("told", BF16)
        if out is not None:
            plain = out._local_tensor if isinstance(out, DTensor) else out
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(plain):
                plain.copy_(outputs[0])
            return None
        wide = outputs[0].to(param_dtype)
        return wide, (outputs[0], wide)

    local.fsdp_pre_all_gather = pre.__get__(local)  # type: ignore[attr-defined]
    local.fsdp_post_all_gather = post.__get__(local)  # type: ignore[attr-defined]


def rounded(model: nn.Module) -> Any:
    """With weights that bfloat16 holds, so that the plain model is the reference."""
    for param in model.parameters():
        param.data.copy_(param.data.to(BF16).to(param.dtype))
    return model


def test_set_on_a_tensor() -> None:
    """By hand, before the first forward and after it: from then on it is gathered so."""
    for num_before in (0, 1):
        twin, policy = Twin(rounded(net(width=8)), reshard_after_forward=True), MixedPrecisionPolicy()
        for step in range(num_before):
            twin.backward(make_rows(step, width=8))
        layer, seen = twin.sharded[2], list[Any]()
        set_by_hand(layer.weight._local_tensor, seen)
        for step in range(num_before, 3):
            twin.backward(make_rows(step, width=8))
        twin.check()
        assert len(seen) == 2 * (3 - num_before)  # in forward and in backward
        assert set(seen) == {(1, dist.get_world_size(), (8, 8), (8, 1), layer, policy)}
        for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
            delattr(layer.weight._local_tensor, name)
        num_seen = len(seen)
        twin.backward(make_rows(3, width=8))
        twin.check()
        assert len(seen) == num_seen


def test_set_between_microbatches() -> None:
    """Gradients that wait to be reduced stay; so do they where one of the methods is missing."""
    twin, seen = Twin(rounded(net(width=8))), list[Any]()
    twin.sharded.set_requires_gradient_sync(False)
    twin.backward(make_rows(0, width=8))
    twin.sharded.set_requires_gradient_sync(True)
    local = twin.sharded[0].weight._local_tensor
    set_by_hand(local, seen)
    post = local.fsdp_post_all_gather
    del local.fsdp_post_all_gather
    with pytest.raises(AssertionError, match="lacks fsdp_post_all_gather"):
        twin.sharded(make_rows(1, width=8))
    local.fsdp_post_all_gather = post
    twin.backward(make_rows(1, width=8))
    twin.check()
    assert seen


def test_set_on_two_axes() -> None:
    """Hybrid sharding, and shards of what tensor parallelism has split: told of the shards' axis alone."""
    sizes = (2, dist.get_world_size() // 2)
    mesh, seen = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "shards")), list[Any]()
    twin = Twin(rounded(net(width=8)), mesh=mesh)
    set_by_hand(twin.sharded[0].weight._local_tensor, seen)
    twin.step(make_rows(width=8))
    assert {(ndim, size, shape) for ndim, size, shape, *_ in seen} == {(1, sizes[1], (8, 8))}
    mesh, seen = init_device_mesh("cpu", sizes[::-1], mesh_dim_names=("shards", "parts")), []
    model, single = rounded(net(1, 8)), rounded(net(1, 8))
    parallelize_module(model, mesh["parts"], {"0": ColwiseParallel(output_layouts=Replicate())})
    fully_shard(model, mesh=mesh["shards"])
    set_by_hand(model[0].weight._local_tensor, seen)
    for step in range(2):
        rows = make_rows(step, width=8)
        for each in (model, single):
            each.zero_grad()
            each(rows).square().mean().backward()
    apart = model[0].weight.grad.full_tensor() - single[0].weight.grad
    assert apart.abs().max() <= 1e-12
    assert {(ndim, size, shape) for ndim, size, shape, *_ in seen} == {(1, sizes[1], (8 // sizes[0], 8))}


def test_a_gather_without_its_other_end_is_refused() -> None:
    class Half(Wrapped):
        def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
            return (self.inner,), None

    def shard_and_run() -> None:
        model = nn.Linear(8, 8, bias=False)
        model.weight = nn.Parameter(Half(model.weight.detach()))
        fully_shard(model)
        model(torch.ones(2, 8))

    with pytest.raises(AssertionError, match="Both fsdp_pre_all_gather and fsdp_post_all_gather"):
        shard_and_run()


def test_meta_device() -> None:
    """Sharded before there is memory; only the shards are ever made."""
    for wrap in (by_blocks, as_whole):
        with torch.device("meta"):
            model = unfilled_language()
        wrap(model)
        assert all(param.is_meta for param in model.parameters())
        model.to_empty(device="cpu")
        single = Language()
        fill_from(model, single)
        twin = copy.copy(Twin(net()))
        twin.sharded, twin.single = model, single
        twin.assert_same_parameters(0.0)
        for step in range(3):
            twin.step(make_tokens(step), next_token_loss)


def unfilled_language() -> nn.Module:
    """Made on the meta device, where there is nothing to fill."""
    model = Language.__new__(Language)
    nn.Module.__init__(model)
    source = Language()
    for name, child in source.named_children():
        setattr(model, name, copy.deepcopy(child).to("meta"))
    model.head.weight = model.embedding.weight
    return model


def fill_from(model: Any, single: nn.Module) -> None:
    right = dict(single.named_parameters())
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.to_local().copy_(part_of(right[name], param))
            assert_is_shard(param, right[name], name, 0.0)


def by_blocks(model: Any) -> None:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def test_meta_parameters_in_forward_are_refused() -> None:
    model = nn.Linear(WIDTH, WIDTH, device="meta")
    fully_shard(model)
    with pytest.raises(RuntimeError, match="materialized from meta device"):
        model(torch.ones(2, WIDTH))
