"""What weft ties to a user's module: state by feature, and the class that bears its methods."""

from weft.modules.attached import STATES_KEY, attach, attached, check_free, give_class, owners_below

__all__ = ["STATES_KEY", "attach", "attached", "check_free", "give_class", "owners_below"]
