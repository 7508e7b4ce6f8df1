"""Hierarchical federated learning on trees of any depth, with multi-timescale gradient correction."""

from stratafl.errors import InvalidInput
from stratafl.local import clip, constant, corrections, cosine, decay, leaf, step_decay
from stratafl.registry import place, register
from stratafl.rule import Edge, Rule, average
from stratafl.rules import adam, feddyn, fedprox, median, momentum, mtgc, scaffold, yogi
from stratafl.schedule import Draw, Schedule
from stratafl.simulate import Result, RoundResult, Simulation, simulate
from stratafl.tree import Tree

__version__ = "0.1.0"

__all__ = [
    "Draw",
    "Edge",
    "InvalidInput",
    "Result",
    "RoundResult",
    "Rule",
    "Schedule",
    "Simulation",
    "Tree",
    "adam",
    "average",
    "clip",
    "constant",
    "corrections",
    "cosine",
    "decay",
    "feddyn",
    "fedprox",
    "leaf",
    "median",
    "momentum",
    "mtgc",
    "place",
    "register",
    "scaffold",
    "simulate",
    "step_decay",
    "yogi",
]
