"""Initial values that don't depend on how parameters are split: what one process would draw, cut to parts."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from weft import comm
from weft.errors import ConfigError
from weft.tensor_parallel.axis import FEATURE
from weft.tensors import local_of, make_dtensor, make_spec

Slot = tuple[dict[str, Any], str, Any]  # a module's dictionary, a name in it, the parameter there

# Ranks that are threads of one process share its random numbers.
_one_at_a_time = threading.Lock()


def init_parameters(module: nn.Module, *, seed: int | None = None) -> None:
    """Reset all parameters as a single process with this seed would, whatever their placements.

    Every module that has parameters of its own is asked to `reset_parameters`, in the order of
    `module.modules()`, on whole tensors, those of one module and the ones in it at a time; each rank keeps
    its part. Ranks agree on a seed unless one is given: those of the meshes that parameters lie on; give one
    where there are several tensor-parallel groups. A module made on the meta device is given memory first:
    `module.to_empty(device=...)`.
    """
    parts = list(_resettable_parts(module))
    seed = _agree_on_seed(module) if seed is None else seed
    with _one_at_a_time, _seeded(seed, _device_of(module)):
        for part in parts:
            _reset(part)


def _resettable_parts(module: nn.Module) -> Iterator[nn.Module]:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise ConfigError(
                f"init_parameters: '{name}' is on the meta device. Give the module memory first: "
                "module.to_empty(device=...)."
            )
    for name, part in module.named_modules():
        if all(param is None for param in part._parameters.values()):
            continue
        if _reset_method(part) is None:
            raise ConfigError(
                f"init_parameters: '{name}' ({type(part).__name__}) has parameters and no reset_parameters, "
                "so nobody knows what they begin with. Write the method."
            )
        yield part


def _reset_method(part: Any) -> Any:
    return getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)


def _reset(part: nn.Module) -> None:
    slots: list[Slot] = [
        (owner._parameters, name, param)
        for owner in part.modules()
        for name, param in owner._parameters.items()
        if isinstance(param, DTensor)
    ]
    wholes: dict[int, nn.Parameter] = {}
    try:
        for held, name, param in slots:
            if id(param) not in wholes:
                wholes[id(param)] = _whole(param)
            held[name] = wholes[id(param)]
        _reset_method(part)()
    finally:
        for held, name, param in slots:
            held[name] = param
    own = {id(param) for param in part._parameters.values()}
    with torch.no_grad():
        for _, _, param in slots:
            whole = wholes[id(param)]
            if id(param) in own or whole._version > 0:  # of modules inside, only what was written to
                local_of(param).copy_(_own_part(whole.data, param))


def _whole(param: DTensor) -> nn.Parameter:
    """Room for the whole parameter."""
    whole = torch.empty(param.shape, dtype=param.dtype, device=local_of(param).device)
    return nn.Parameter(whole, requires_grad=param.requires_grad)


def _own_part(whole: torch.Tensor, param: DTensor) -> torch.Tensor:
    """This rank's part of a tensor that every rank has; nothing is sent."""
    mesh = param.device_mesh
    everywhere = make_dtensor(whole, make_spec(mesh, [Replicate()] * mesh.ndim, whole))
    return local_of(everywhere.redistribute(placements=param.placements))


def _agree_on_seed(module: nn.Module) -> int:
    """A number that the first rank of the parameters' meshes has drawn."""
    meshes: list[DeviceMesh] = []
    for param in module.parameters():
        if isinstance(param, DTensor) and param.device_mesh not in meshes:
            meshes.append(param.device_mesh)
    seed = torch.randint(2**62, (1,), generator=torch.default_generator, device="cpu")
    for mesh in meshes:
        for group in mesh.get_all_groups():
            drawn = comm.exchange_rows(seed.tolist(), group, feature=FEATURE, name="seed")
            seed = torch.tensor(drawn[0])
    return int(seed)


def _device_of(module: nn.Module) -> torch.device:
    return next((local_of(param).device for param in module.parameters()), torch.device("cpu"))


@contextmanager
def _seeded(seed: int, device: torch.device) -> Generator[None]:
    """Draw from this seed while the block runs; the generators are as before afterwards."""
    is_cpu = device.type == "cpu"
    with torch.random.fork_rng([] if is_cpu else [device], device_type="cuda" if is_cpu else device.type):
        torch.default_generator.manual_seed(seed)
        if not is_cpu:
            generators: Any = torch.get_device_module(device).default_generators
            generators[device.index].manual_seed(seed)
        yield
