"""The main job: train a model on many ranks, by the name of a strategy."""

from weft.training.checkpoints import Checkpoints
from weft.training.command import define_train_command
from weft.training.demo import define_demo_command
from weft.training.trainer import Strategy, Trainer

__all__ = ["Checkpoints", "Strategy", "Trainer", "define_demo_command", "define_train_command"]
