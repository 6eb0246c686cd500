"""What weft ties to a user's module: state by feature, the class that bears its methods; who holds it."""

from weft.modules.attached import attach, attached, check_free, give_class, owners_below
from weft.modules.holders import STATES_KEY
from weft.modules.nominal import Prepared, enter_state, known_as_wrapper, sharded_base
from weft.modules.wrappers import check_outside_wrapper, check_unheld, watch_wrappers

__all__ = [
    "STATES_KEY",
    "Prepared",
    "attach",
    "attached",
    "check_free",
    "check_outside_wrapper",
    "check_unheld",
    "enter_state",
    "give_class",
    "known_as_wrapper",
    "owners_below",
    "sharded_base",
    "watch_wrappers",
]
