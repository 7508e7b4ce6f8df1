"""The methods that ship with the package, registered on import."""

from stratafl.core.rule import average
from stratafl.rules.averaging import median
from stratafl.rules.correction import mtgc, scaffold
from stratafl.rules.proximal import feddyn, fedprox
from stratafl.rules.registry import keep_names
from stratafl.rules.server import adam, momentum, yogi

keep_names()

__all__ = [
    "adam",
    "average",
    "feddyn",
    "fedprox",
    "median",
    "momentum",
    "mtgc",
    "scaffold",
    "yogi",
]
