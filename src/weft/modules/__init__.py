"""What weft ties to a user's module: state by feature, and the class that bears its methods."""

from weft.modules.attached import attach, attached, give_class, owners_below

__all__ = ["attach", "attached", "give_class", "owners_below"]
