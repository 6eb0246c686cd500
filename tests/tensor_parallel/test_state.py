"""State dicts of parallel models, pickled, loaded, and checkpoints into other worlds and meshes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate

import weft
import weft.tensor_parallel as weft_tp
from tests.ranks import run_on
from tests.tensor_parallel.models import Language, language_plan, next_token_loss, sequence_plan
from tests.tensor_parallel.twins import (
    Twin,
    assert_is_part,
    assert_same_parameters,
    local_of,
    make_mesh,
    tokens,
)

pytest_plugins = ["tests.tensor_parallel.libraries"]
pytestmark = [
    run_on(threads=2, library=["weft"]),
    run_on(threads=2, library=["torch"], full=True),
    run_on(gloo=2, library=["weft"], full=True),
    run_on(gpu=2, library=["weft"], timeout=90, collective_timeout=20),
]

VOCABULARY = 11  # uneven
PLANS: dict[str, Callable[[Any], Any]] = {"copies": language_plan, "sequence": sequence_plan}


def make_model(seed: int = 0) -> Language:
    model = Language(VOCABULARY)
    for param in model.parameters():
        param.data.add_(seed)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Adam, whose state lies as the parameters do. SGD's momentum lies as the gradients, which are addends of
    a sum for copies behind a sequence that is split: torch's checkpoints refuse those from torch 2.14 on.
    """
    return torch.optim.Adam(model.parameters(), lr=0.01)


def make_words(step: int) -> torch.Tensor:
    return tokens(4, 7, vocabulary=VOCABULARY, seed=step)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """All rows on every rank: a mean over the data axis changes nothing."""
    optimizer.zero_grad()
    next_token_loss(model, make_words(step)).backward()
    optimizer.step()


def trained(steps: int) -> Language:
    """What a single process has after so many steps."""
    model = make_model()
    optimizer = make_optimizer(model)
    for step in range(steps):
        train(model, optimizer, step)
    return model


def assert_holds(model: nn.Module, right: nn.Module, tolerance: float = 1e-9) -> None:
    wanted = dict(right.named_parameters())
    for name, param in model.named_parameters():
        assert_is_part(param, wanted[name].detach(), name, tolerance)


def lay_out(tp: Any, model: nn.Module, layout: str) -> nn.Module:
    """TP over all ranks, with data parallelism on two by some, or without TP."""
    size = dist.get_world_size()
    if layout in PLANS:
        tp.parallelize_module(model, make_mesh(), PLANS[layout](tp))
    elif layout == "fully_shard":
        weft.fully_shard(model, mesh=make_mesh())
    else:
        mesh = make_mesh(2, size // 2, names="dp tp")
        tp.parallelize_module(model, mesh["tp"], sequence_plan(tp))
        if layout == "fully_shard x tp":
            weft.fully_shard(model, mesh=mesh["dp"])
        elif layout == "replicate x tp":
            weft.replicate(model, device_mesh=mesh["dp"])
        else:
            raise AssertionError(layout)
    return model


def save(tp: Any, path: str, layout: str) -> None:
    """Model and optimizer after two steps."""
    model = lay_out(tp, make_model(), layout)
    optimizer = make_optimizer(model)
    for step in range(2):
        train(model, optimizer, step)
    assert_holds(model, trained(2))
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)


def load(tp: Any, path: str, layout: str) -> None:
    """Into a model that lies otherwise, and go on as if nothing had been."""
    model = lay_out(tp, make_model(seed=5), layout)
    optimizer = make_optimizer(model)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert_holds(model, trained(2))
    train(model, optimizer, 2)
    assert_holds(model, trained(3))


def load_plain(path: str) -> None:
    """Into a model without any parallelism, in a process without ranks."""
    model = make_model(seed=5)
    state = {"model": model.state_dict()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.load(state, checkpoint_id=path, no_dist=True)
    model.load_state_dict(state["model"])
    assert_same_parameters(model, trained(2), 1e-9)


def test_names_and_values(tp: Any) -> None:
    """The names of the bare model, the parameters' own memory, and no collective."""
    for plan in PLANS.values():
        single, model = make_model(), make_model()
        tp.parallelize_module(model, make_mesh(), plan(tp))
        for has_run in (False, True):
            if has_run:
                next_token_loss(model, make_words(0)).backward()
            with weft.record() as events:
                state = model.state_dict()
            assert events == []
            assert list(state) == list(single.state_dict())
            for name, param in model.named_parameters():
                assert isinstance(state[name], DTensor) == isinstance(param, DTensor)
                assert local_of(state[name]).data_ptr() == local_of(param).data_ptr()
            assert_holds(model, single, 0.0)


def test_loaded_back(tp: Any) -> None:
    """load_state_dict keeps the parameters' objects; the next forward sees the values."""
    twin = Twin(tp, make_model(), make_mesh(), sequence_plan(tp))
    saved = {name: tensor.detach().clone() for name, tensor in twin.parallel.state_dict().items()}
    right = {name: tensor.detach().clone() for name, tensor in twin.single.state_dict().items()}
    before = [id(param) for param in twin.parallel.parameters()]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (twin.parallel, twin.single)]
    for each, optimizer in zip((twin.parallel, twin.single), optimizers, strict=True):
        train(each, optimizer, 0)
    twin.parallel.load_state_dict(saved)
    twin.single.load_state_dict(right)
    assert [id(param) for param in twin.parallel.parameters()] == before
    twin.zero()
    twin.run(make_words(1)[:, :-1], Replicate(), Replicate())


def test_assigned(tp: Any) -> None:
    """load_state_dict(assign=True) puts other tensors in place, which are used from then on."""
    model, other = make_model(), make_model(seed=3)
    for each in (model, other):
        tp.parallelize_module(each, make_mesh(), language_plan(tp))
    model.load_state_dict(other.state_dict(), assign=True)
    assert_holds(model, make_model(seed=3), 0.0)
    right = make_model(seed=3)(make_words(0))
    assert torch.allclose(model(make_words(0)), right)


@run_on(gloo=2, full=True)
@run_on(gpu=2, timeout=90, collective_timeout=20)
def test_pickled(tp: Any) -> None:
    """A state dict through torch.save and torch.load."""
    model = make_model()
    tp.parallelize_module(model, make_mesh(), language_plan(tp))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    other = make_model(seed=3)
    tp.parallelize_module(other, make_mesh(), language_plan(tp))
    other.load_state_dict(state)
    assert_holds(other, make_model(), 0.0)


def test_full_state_dicts(tp: Any) -> None:
    """torch's own functions for full state dicts, both ways."""
    model, right = make_model(), make_model(seed=3)
    tp.parallelize_module(model, make_mesh(), sequence_plan(tp))
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, right.state_dict(), options=options)
    assert_holds(model, right, 0.0)
    state = get_model_state_dict(model, options=options)
    for name, tensor in right.state_dict().items():
        assert type(state[name]) is torch.Tensor
        assert torch.equal(state[name], tensor), name


@run_on(threads=2)
@run_on(gloo=2, full=True)
@run_on(gpu=2, timeout=90, collective_timeout=20)
def test_tied_weights(tp: Any) -> None:
    """Both names are there, and one memory."""
    model = Language(VOCABULARY, is_tied=True)
    tp.parallelize_module(model, make_mesh(), language_plan(tp))
    state = model.state_dict()
    assert {"embedding.weight", "head.weight"} <= set(state)
    state = {name: tensor.detach().clone() + 1 for name, tensor in state.items()}
    model.load_state_dict(state)
    assert model.head.weight is model.embedding.weight


# Checkpoints into other worlds. From, to: layouts and ranks
WORLDS = [
    ("copies", 2, "sequence", 4),
    ("fully_shard x tp", 4, "sequence", 4),
    *(
        pytest.param(*world, marks=pytest.mark.full)
        for world in (
            ("sequence", 4, "copies", 2),
            ("sequence", 4, "fully_shard", 4),
            ("fully_shard", 2, "fully_shard x tp", 4),
            ("replicate x tp", 4, "copies", 2),
        )
    ),
]


def on_threads(body: Callable[..., None], ranks: int, *args: Any) -> None:
    weft.launch(body, args=args, ranks=ranks, kind="thread", timeout=60, collective_timeout=20)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], str]:
    """Saved once for each layout and number of ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def find(layout: str, ranks: int) -> str:
        path = folder / f"{layout} on {ranks}"
        if not path.exists():
            on_threads(save, ranks, weft_tp, str(path), layout)
        return str(path)

    return find


@run_on()
@pytest.mark.threads
@pytest.mark.parametrize(("saved", "savers", "loaded", "loaders"), WORLDS)
def test_a_checkpoint_is_loaded_into_another_world(
    checkpoints: Callable[[str, int], str], saved: str, savers: int, loaded: str, loaders: int
) -> None:
    on_threads(load, loaders, weft_tp, checkpoints(saved, savers), loaded)


@run_on()
@pytest.mark.threads
@pytest.mark.parametrize(
    ("layout", "ranks"), [("sequence", 4), pytest.param("fully_shard x tp", 4, marks=pytest.mark.full)]
)
def test_a_checkpoint_is_loaded_into_a_plain_model(
    checkpoints: Callable[[str, int], str], layout: str, ranks: int
) -> None:
    load_plain(checkpoints(layout, ranks))
