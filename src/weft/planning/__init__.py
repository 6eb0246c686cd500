"""What a run would need on machines that are not here: `weft plan`."""

from weft.planning.api import EIGHT_GPUS, PlanOptions, StrategyPlan, plan
from weft.planning.clock import StepTime
from weft.planning.command import define_plan_command
from weft.planning.job import Job
from weft.planning.machine import Link, Links, Machine
from weft.planning.memory import Memory
from weft.planning.simulate import Simulated
from weft.planning.traffic import Traffic

__all__ = [
    "EIGHT_GPUS",
    "Job",
    "Link",
    "Links",
    "Machine",
    "Memory",
    "PlanOptions",
    "Simulated",
    "StepTime",
    "StrategyPlan",
    "Traffic",
    "define_plan_command",
    "plan",
]
