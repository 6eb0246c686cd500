"""A tensor-parallel module beside a bare copy of it: outputs and all gradients agree?

A full tensor is cut for a rank with torch.chunk here, and put together again from the ranks' parts with
torch.cat, never by the code that is tested; so an error in a layout shows. Tests take `tp`, the library that
is tested: weft.tensor_parallel, or torch's own where torch is right, which shows that the tests are.

Meshes, models and numbers that are made here lie on the device of the rank's test, see `library_on`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from weft.testing.models import fill_parameters

# Of the largest value: sums over ranks instead of over features.
ROUNDINGS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}

_device: ContextVar[str] = ContextVar("device", default="cpu")


@contextmanager
def library_on(kind: str, library: Any) -> Generator[Any]:
    """The library, while what is made here lies on this kind of device. For the rank that enters."""
    token = _device.set(kind)
    try:
        yield library
    finally:
        _device.reset(token)


def device() -> str:
    """The kind of device of this rank's test."""
    return _device.get()


def there(made: Any) -> Any:
    """A module or tensor of the CPU, on that device."""
    return made if device() == "cpu" else made.to(device())


def make_mesh(*sizes: int, names: str | None = None) -> DeviceMesh:
    """All ranks in a row, unless sizes and names of axes are given."""
    sizes = sizes or (dist.get_world_size(),)
    axes = None if names is None else tuple(names.split())
    return init_device_mesh(device(), sizes, mesh_dim_names=axes)


def filled(module: nn.Module, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """The module with parameters that are the same on every rank and none of which is zero or one."""
    module = module.to(dtype)
    fill_parameters(module, seed)
    for each in module.modules():
        if isinstance(each, nn.Embedding) and each.padding_idx is not None:
            each.weight.data[each.padding_idx].zero_()
    return there(module)


def numbers(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return there(torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype))


def tokens(*shape: int, vocabulary: int, seed: int = 1) -> torch.Tensor:
    return there(torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed)))


def part_of(full: torch.Tensor, layout: Placement, mesh: DeviceMesh) -> torch.Tensor:
    """What the calling rank holds of a full tensor that lies so on a mesh of one axis."""
    rank, size = mesh.get_local_rank(), mesh.size()
    if isinstance(layout, Shard):
        chunks = full.chunk(size, layout.dim)
        part = chunks[rank] if rank < len(chunks) else full.narrow(layout.dim, 0, 0)
        return part.contiguous()
    if layout.is_partial():  # parts that are different and none of which is zero
        return full * ((rank + 1) / (size * (size + 1) / 2))
    assert layout.is_replicate(), layout
    return full.clone()


def dual_of(layout: Placement) -> Placement:
    """How the gradient lies of a local tensor that lies so."""
    return Replicate() if layout.is_partial() else layout


def whole_of(part: torch.Tensor, layout: Placement, mesh: DeviceMesh) -> torch.Tensor:
    """The full tensor of the ranks' parts; those that should be the same are compared to the bit."""
    parts: list[Any] = [None] * mesh.size()
    dist.all_gather_object(parts, part.detach().clone(), group=mesh.get_group())
    if isinstance(layout, Shard):
        return torch.cat(parts, layout.dim)
    if layout.is_partial():
        return torch.stack(parts).sum(0)
    for other in parts[1:]:
        assert torch.equal(other, parts[0]), "copies differ"
    return parts[0]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds, detached."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def full_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor, as a user asks for it; all ranks must do so together."""
    # Not detached first: DTensor's dispatcher remembers meshes, and hands out those of a job that is over.
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def assert_close(seen: torch.Tensor, right: torch.Tensor, name: str, tolerance: float | None = None) -> None:
    """Plain tensors of one shape and dtype; the difference allowed follows the largest value."""
    assert type(seen) is not DTensor, f"{name}: a DTensor"
    assert seen.shape == right.shape, f"{name}: {list(seen.shape)}, not {list(right.shape)}"
    assert seen.dtype == right.dtype, f"{name}: {seen.dtype}, not {right.dtype}"
    if right.numel() == 0:
        return
    tolerance = ROUNDINGS[right.dtype] if tolerance is None else tolerance
    wide_seen, wide_right = seen.detach().double(), right.detach().double()
    apart = (wide_seen - wide_right).abs().max().item()
    allowed = tolerance * wide_right.abs().max().item()
    assert math.isfinite(apart), f"{name}: not finite"
    assert apart <= allowed, f"{name}: {apart:.3g} apart, {allowed:.3g} allowed"


def assert_same_parameters(
    parallel: nn.Module, single: nn.Module, tolerance: float | None = None, prefix: str = ""
) -> None:
    right = dict(single.named_parameters())
    seen = {name.removeprefix(prefix): param for name, param in parallel.named_parameters()}
    assert list(seen) == list(right)
    for name, param in seen.items():
        assert param.shape == right[name].shape, name
        assert param.requires_grad == right[name].requires_grad, name
        assert_close(full_of(param), right[name].detach(), name, tolerance)


def assert_same_gradients(
    parallel: nn.Module, single: nn.Module, tolerance: float | None = None, prefix: str = ""
) -> None:
    """Of every parameter, in full; a parameter that is a DTensor has a DTensor on its mesh as gradient."""
    right = {name: param.grad for name, param in single.named_parameters()}
    seen: dict[str, Any] = {name.removeprefix(prefix): param for name, param in parallel.named_parameters()}
    assert list(seen) == list(right)
    for name, param in seen.items():
        wanted = right[name]
        assert (param.grad is None) == (wanted is None), f"{name}: has a gradient, or lacks one"
        if param.grad is None or wanted is None:
            continue
        assert isinstance(param.grad, DTensor) == isinstance(param, DTensor), f"{name}: {type(param.grad)}"
        grad: Any = param.grad
        if isinstance(param, DTensor):
            assert grad.device_mesh == param.device_mesh, name
        assert_close(full_of(param.grad), wanted, f"gradient of {name}", tolerance)


def are_different(mine: torch.Tensor) -> bool:
    """On every two ranks."""
    everyones = parts_of_all(mine)
    return not any(torch.equal(everyones[a], everyones[b]) for a in range(len(everyones)) for b in range(a))


def are_same(mine: torch.Tensor) -> bool:
    """On all ranks."""
    everyones = parts_of_all(mine)
    return all(torch.equal(each, everyones[0]) for each in everyones)


def parts_of_all(mine: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's, in the CPU's memory."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine.detach().cpu())
    return everyones


@contextmanager
def unchanged(module: nn.Module) -> Generator[None]:
    """Parameters, buffers and hooks are the same objects behind the block; values too."""

    def see() -> list[Any]:
        hooks = [
            (id(each), len(each._forward_hooks), len(each._forward_pre_hooks), each.forward.__func__)
            for each in module.modules()
        ]
        return [[(name, id(param)) for name, param in module.named_parameters()], hooks]

    before, values = see(), [param.detach().clone() for param in module.parameters()]
    yield
    assert see() == before
    for param, value in zip(module.parameters(), values, strict=True):
        assert type(param.data) is torch.Tensor
        assert torch.equal(param, value)


def assert_is_part(seen: torch.Tensor, right: torch.Tensor, name: str, tolerance: float) -> None:
    """What this rank holds is its part of `right`, on any mesh. Only sums are sent."""
    if not isinstance(seen, DTensor):
        assert_close(seen.detach(), right, name, tolerance)
        return
    assert seen.shape == right.shape, name
    if any(placement.is_partial() for placement in seen.placements):
        assert_close(full_of(seen), right, name, tolerance)
        return
    allowed = tolerance * (right.abs().max().item() if right.numel() else 0.0)
    cuts: list[tuple[int, Any]] = [
        (axis, each) for axis, each in enumerate(seen.placements) if not each.is_replicate()
    ]
    # A part that is cut again by an axis in front of it says so; that cut comes last.
    for axis, placement in sorted(cuts, key=lambda cut: type(cut[1]) is not Shard):
        dim, size, place = placement.dim, seen.device_mesh.size(axis), seen.device_mesh.get_local_rank(axis)
        chunks = right.chunk(size, dim)
        right = chunks[place] if place < len(chunks) else right.narrow(dim, 0, 0)
    local = local_of(seen)
    assert local.shape == right.shape, f"{name}: this rank holds {local.shape}, not {right.shape}"
    apart = (local - right).abs().max().item() if right.numel() else 0.0
    assert apart <= allowed, f"{name}: {apart:.3g} apart, {allowed:.3g} allowed"


def local_input(full: torch.Tensor, layout: Placement, mesh: DeviceMesh) -> torch.Tensor:
    """A leaf that is this rank's part."""
    part = part_of(full.detach(), layout, mesh)
    return part.requires_grad_(part.is_floating_point())


def dtensor_input(full: torch.Tensor, layout: Placement, mesh: DeviceMesh) -> DTensor:
    """The same as a DTensor; a leaf too."""
    part = part_of(full.detach(), layout, mesh)
    made: Any = DTensor.from_local(
        part, mesh, [layout], run_check=False, shape=full.shape, stride=contiguous_strides(full.shape)
    )
    return made.requires_grad_(part.is_floating_point())


def contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def check_output(
    seen: torch.Tensor, right: torch.Tensor, layout: Placement, mesh: DeviceMesh, is_local: bool
) -> None:
    """An output that lies as asked for, of the asked type, is the single process's."""
    assert isinstance(seen, DTensor) != is_local, type(seen)
    if isinstance(seen, DTensor):
        assert seen.placements == (normal(layout, right.dim()),), seen.placements
        assert seen.shape == right.shape, f"{list(seen.shape)}, not {list(right.shape)}"
    local = local_of(seen)
    if not layout.is_partial():
        assert local.shape == part_of(right, layout, mesh).shape
    assert_close(whole_of(local, layout, mesh), right.detach(), "output")


def normal(layout: Placement, num_dims: int) -> Placement:
    """The same, its dim not negative."""
    return Shard(layout.dim % num_dims) if isinstance(layout, Shard) else layout


def pull_back(seen: torch.Tensor, cotangent: torch.Tensor, layout: Placement, mesh: DeviceMesh) -> None:
    """Backward from an output that lies so, with this rank's part of the gradient."""
    part = part_of(cotangent, dual_of(layout), mesh)
    before = part.clone()
    if isinstance(seen, DTensor):
        grad = DTensor.from_local(
            part,
            mesh,
            [dual_of(layout)],
            run_check=False,
            shape=cotangent.shape,
            stride=contiguous_strides(cotangent.shape),
        )
        seen.backward(grad)
    else:
        seen.backward(part)
    assert torch.equal(part, before), "the gradient that came was written to"


def check_input_gradient(
    given: torch.Tensor, right: torch.Tensor, layout: Placement, mesh: DeviceMesh
) -> None:
    """A local input's gradient lies as its layout's dual does; a DTensor's is right in full."""
    assert given.grad is not None, "no gradient of the input"
    if isinstance(given, DTensor):
        assert_close(full_of(given.grad), right, "gradient of the input")
    else:
        assert_close(given.grad, part_of(right, dual_of(layout), mesh), "gradient of the input")


class Twin:
    """`single` is a bare copy of the module; `parallel` has the plan."""

    def __init__(self, tp: Any, module: nn.Module, mesh: DeviceMesh, plan: Any, **options: Any) -> None:
        self.mesh = mesh
        self.single: Any = copy.deepcopy(module)
        self.parallel: Any = tp.parallelize_module(module, mesh, plan, **options)
        assert self.parallel is module
        assert_same_parameters(self.parallel, self.single, tolerance=0.0)

    def run(
        self,
        full: torch.Tensor,
        given_layout: Placement,
        output_layout: Placement,
        is_local: bool = True,
        has_dtensor_input: bool = False,
    ) -> None:
        """Forward and backward of both from one input, and compare all there is."""
        make_input = dtensor_input if has_dtensor_input else local_input
        given = make_input(full, given_layout, self.mesh)
        whole = full.clone().requires_grad_(full.is_floating_point())
        right = self.single(whole)
        before = local_of(given).clone()
        seen = self.parallel(given)
        check_output(seen, right, output_layout, self.mesh, is_local)
        cotangent = numbers(*right.shape, seed=7, dtype=right.dtype)
        right.backward(cotangent)
        pull_back(seen, cotangent, output_layout, self.mesh)
        assert torch.equal(local_of(given), before), "the input was written to"
        if full.is_floating_point():
            assert whole.grad is not None
            check_input_gradient(given, whole.grad, given_layout, self.mesh)
        self.check()

    def check(self, tolerance: float | None = None) -> None:
        assert_same_gradients(self.parallel, self.single, tolerance)

    def zero(self) -> None:
        for each in (self.parallel, self.single):
            each.zero_grad(set_to_none=True)


def sgd_of(model: nn.Module, lr: float) -> torch.optim.SGD:
    """For plans that leave some parameters plain: torch's optimizers step many parameters of a group at once,
    by default on GPUs, and refuse to do so with plain ones and DTensors together.
    """
    kinds: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for param in model.parameters():
        kinds[isinstance(param, DTensor)].append(param)
    return torch.optim.SGD([{"params": params} for params in kinds.values() if params], lr=lr)


LAYOUTS: dict[str, Placement] = {
    "R": Replicate(),
    "S0": Shard(0),
    "S1": Shard(1),
    "S-1": Shard(-1),
    "P": Partial(),
}
