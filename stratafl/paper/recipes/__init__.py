"""The paper's tables and figures as named configs."""

from stratafl.base.errors import unknown_name
from stratafl.paper.recipes import appendix, figures
from stratafl.paper.recipes.base import Case, Options, Recipe, essence, run_name, runs_of

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        figures.TABLE1,
        figures.FIG3,
        figures.FIG4,
        figures.FIG5,
        figures.FIG6,
        figures.FIG7A,
        figures.FIG7B,
        appendix.LABEL_SHIFT,
        appendix.FEATURE_SHIFT,
        appendix.SHAKESPEARE,
        appendix.CINIC10,
        appendix.THREE_LEVEL,
        appendix.SEARCH,
    )
}
ALL = tuple(name for name in RECIPES if name != "search")
"""What `all` stands for: everything the paper shows."""


def recipe(name: str) -> Recipe:
    """The recipe of this name, or the complaint."""
    if name not in RECIPES:
        raise unknown_name("WHAT", name, ("all", *RECIPES))
    return RECIPES[name]


__all__ = ["ALL", "RECIPES", "Case", "Options", "Recipe", "essence", "recipe", "run_name", "runs_of"]
