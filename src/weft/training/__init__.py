"""The main job: train a model on many ranks, by the name of a strategy."""

from weft.training.checkpoints import Checkpoints
from weft.training.command import add_train_command
from weft.training.demo import add_demo_command
from weft.training.trainer import Strategy, Trainer

__all__ = ["Checkpoints", "Strategy", "Trainer", "add_demo_command", "add_train_command"]
