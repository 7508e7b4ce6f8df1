"""Cost of stored runs on a network: time, energy, traffic, money."""

from stratafl.base.callable_package import make_callable

make_callable(__name__, "pricing")
