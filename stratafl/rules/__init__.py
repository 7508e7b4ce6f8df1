"""Every rule that ships with the package, registered on import."""

from stratafl.core.rule import average
from stratafl.rules.averaging import median
from stratafl.rules.correction import mtgc, scaffold
from stratafl.rules.proximal import feddyn, fedprox
from stratafl.rules.registry import keep_names, register
from stratafl.rules.server import adam, momentum, yogi

register("average", at="every", summary="HFedAvg's rule for one edge: the weighted mean of the children.")(average)
register("hfedavg", at="every", summary="HFedAvg: averaging at every level, each at its own period.")(average)
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
