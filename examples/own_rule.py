"""A method of your own in a few lines: a proximal term that grows with the squared distance.

stratafl run examples/own_rule.toml
"""

from stratafl import Rule, average, register
from stratafl.base.validation import check_number


@register("homesick")
def homesick(pull: float = 0.05) -> Rule:
    """Adds pull * d * |d| to the gradient, where d is the distance from the parent's model."""
    pull = check_number("homesick.pull", pull, at_least=0, at_most=1e6)
    return average()._replace(local=lambda x, g, edge: g + pull * (x - edge.model) * (x - edge.model).abs())
