"""Other libraries train what weft holds as one process would. Skipped where they are not installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.data_parallel.strategies import full
from tests.ranks import run_on

pytestmark = [
    run_on(gloo=2, timeout=60, collective_timeout=60, full=True),  # the ranks import them one after the other
    pytest.mark.filterwarnings("ignore"),
]

RATE = 1e-2


def needs(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).double()


def tokens(index: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 64, (8,), generator=torch.Generator().manual_seed(index))
    return {"input_ids": ids, "labels": ids.clone()}


def batch(index: int) -> dict[str, torch.Tensor]:
    rows = [tokens(2 * index), tokens(2 * index + 1)]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def by_layer(model: Any) -> Any:
    for layer in model.model.layers:
        weft.fully_shard(layer)
    return weft.fully_shard(model)


STRATEGIES: dict[str, Callable[[Any], Any]] = {
    "DistributedDataParallel": weft.DistributedDataParallel,
    "replicate": weft.replicate,
    "fully_shard": by_layer,
}


def assert_as_alone(trained: nn.Module, alone: nn.Module) -> None:
    for param, right in zip(trained.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(param), right, rtol=1e-9, atol=1e-12)


@needs("transformers", "accelerate")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accelerate(strategy: str) -> None:
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]
    from accelerate.state import AcceleratorState, GradientState  # pyright: ignore[reportMissingImports]
    from torch.utils.data import DataLoader

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    size = dist.get_world_size()
    model = STRATEGIES[strategy](llama())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    rows: Any = [tokens(index) for index in range(8 * size)]
    prepared, stepping, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))
    assert prepared is model
    for index, inputs in enumerate(loader):
        with accelerator.accumulate(prepared), weft.record() as events:
            accelerator.backward(prepared(**inputs).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
            stepping.step()
            stepping.zero_grad()
        is_reduced = any("reduce" in event.op for event in events)
        assert is_reduced == (index % 2 == 1)
    assert type(accelerator.unwrap_model(prepared)).__name__.removeprefix("FSDP") == "LlamaForCausalLM"

    alone = llama()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=RATE)
    for step in range(2):
        optimizer.zero_grad()
        for index in range(2 * size):
            (alone(**batch(2 * size * step + index)).loss / (2 * size)).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        optimizer.step()
    assert_as_alone(model, alone)


# A wrapper hides the model's class, which Trainer asks for the kind of loss.
@needs("transformers", "accelerate")
@pytest.mark.parametrize("strategy", ["replicate", "fully_shard"])
def test_trainer(strategy: str, tmp_path: Path) -> None:
    """transformers' Trainer: the mean is over the labels of all ranks, which have unequally many."""
    from accelerate.state import AcceleratorState, GradientState  # pyright: ignore[reportMissingImports]
    from transformers import Trainer, TrainingArguments  # pyright: ignore[reportMissingImports]

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    size, num_steps = dist.get_world_size(), 2
    rows = [tokens(index) for index in range(4 * size * num_steps)]
    for index, row in enumerate(rows):
        row["labels"][: index % 5] = -100
    options = TrainingArguments(
        str(tmp_path),
        max_steps=num_steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        train_sampling_strategy="sequential",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",  # Adam's steps and clipped ones hide a wrong scale
        max_grad_norm=0.0,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model = STRATEGIES[strategy](llama())
    with weft.record() as events:
        Trainer(model=model, args=options, train_dataset=rows).train()
    assert any("reduce" in event.op for event in events)

    alone = llama()
    optimizer = torch.optim.SGD(alone.parameters(), lr=RATE)
    for step in range(num_steps):
        # The microbatches of all ranks at once: a mean over labels doesn't depend on who has which row.
        part = rows[step * 4 * size :][: 4 * size]
        alone(**{name: torch.stack([row[name] for row in part]) for name in part[0]}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_as_alone(model, alone)


@needs("transformers", "peft")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_peft(strategy: str, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model  # pyright: ignore[reportMissingImports]

    def adapted() -> Any:
        config = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.0, init_lora_weights=False)
        base = llama()
        torch.manual_seed(1)
        return get_peft_model(base, config).double()

    rank, size = dist.get_rank(), dist.get_world_size()
    model, alone = adapted(), adapted()
    model = weft.fully_shard(model) if strategy == "fully_shard" else STRATEGIES[strategy](model)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=RATE) for one in (model, alone)]
    for step in range(2):
        model(**batch(size * step + rank)).loss.backward()
        for other in range(size):
            (alone(**batch(size * step + other)).loss / size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_as_alone(model, alone)
    state = weft.fsdp.full_state_dict(model) if strategy == "fully_shard" else None
    if rank == 0:
        saving = model.module if strategy == "DistributedDataParallel" else model
        saving.save_pretrained(tmp_path, state_dict=state)
        again = PeftModel.from_pretrained(llama(), tmp_path).double()
        right = alone.state_dict()
        assert all(torch.allclose(value, right[name]) for name, value in again.state_dict().items())
    dist.barrier()


@needs("transformers", "lightning")
def test_fabric() -> None:
    from lightning.fabric import Fabric  # pyright: ignore[reportMissingImports]

    rank, size = dist.get_rank(), dist.get_world_size()
    alone = llama()
    fabric = Fabric(accelerator="cpu", devices=1)
    trained = weft.replicate(llama())
    model, optimizer = fabric.setup(trained, torch.optim.AdamW(trained.parameters(), lr=RATE))
    right = torch.optim.AdamW(alone.parameters(), lr=RATE)
    for step in range(2):
        optimizer.zero_grad()
        right.zero_grad()
        fabric.backward(model(**batch(size * step + rank)).loss)
        for other in range(size):
            (alone(**batch(size * step + other)).loss / size).backward()
        optimizer.step()
        right.step()
    assert_as_alone(trained, alone)
