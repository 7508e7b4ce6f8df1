"""Search for the cheapest setting that reaches a target."""

from stratafl.base.callable_package import make_callable

make_callable(__name__, "tuning")
