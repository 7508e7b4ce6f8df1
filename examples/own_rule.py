"""A method of one's own in a few lines: clients pulled home, the harder the further away they are.

stratafl run examples/own_rule.toml
"""

from stratafl import Rule, average, register
from stratafl.base.validation import check_number


@register("homesick")
def homesick(pull: float = 0.05) -> Rule:
    """Pull towards the parent's model, the harder the larger the coordinate's distance."""
    pull = check_number("homesick.pull", pull, at_least=0, at_most=1e6)
    return average()._replace(local=lambda x, g, edge: g + pull * (x - edge.model) * (x - edge.model).abs())
