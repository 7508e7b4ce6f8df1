"""Published numbers of the paper (Fang et al., MTGC, NeurIPS 2024): Table 1 and Appendix B.

The figures of the paper have no numbers; the claims of its text are in `claims`.
"""

from __future__ import annotations

from typing import NamedTuple

from papers.mtgc.settings import CORRECTIONS


class Rounds(NamedTuple):
    """Global rounds to the target: mean and standard deviation of 3 trials, or a lower bound."""

    mean: float
    deviation: float | None
    speedup: float
    """Speed-up over HFedAvg, as printed; a lower bound if HFedAvg did not reach the target."""

    @property
    def beyond(self) -> bool:
        return self.deviation is None


def _row(*cells: tuple[float, float | None, float]) -> dict[str, Rounds]:
    return dict(zip(CORRECTIONS, (Rounds(*cell) for cell in cells), strict=True))


BEYOND = (500.0, None, 1.0)

TABLE1: dict[tuple[str, int, int], dict[str, Rounds]] = {
    # group i.i.d. & client non-i.i.d.
    ("client", 10, 20): _row((144.3, 3.4, 1.0), (57.0, 0.8, 2.5), (72.0, 1.6, 2.0), (45.7, 0.9, 3.2)),
    ("client", 10, 30): _row((169.0, 2.4, 1.0), (51.0, 1.4, 3.3), (81.3, 1.2, 2.1), (37.3, 1.9, 4.5)),
    ("client", 10, 40): _row((214.0, 5.9, 1.0), (45.3, 1.2, 4.7), (85.7, 1.2, 2.5), (32.0, 0.8, 6.7)),
    ("client", 20, 20): _row((105.0, 4.1, 1.0), (34.0, 0.8, 3.0), (53.0, 0.8, 2.0), (22.3, 0.9, 4.7)),
    ("client", 30, 20): _row((82.7, 2.1, 1.0), (25.7, 0.9, 3.2), (44.7, 0.5, 1.8), (16.3, 1.2, 5.1)),
    # group non-i.i.d. & client i.i.d.
    ("group", 10, 20): _row((246.0, 3.7, 1.0), (92.3, 1.7, 2.7), (53.7, 1.2, 4.6), (37.7, 0.5, 6.5)),
    ("group", 10, 30): _row((302.7, 4.9, 1.0), (88.0, 1.6, 3.4), (44.3, 1.2, 6.8), (27.3, 1.2, 11.1)),
    ("group", 10, 40): _row((320.0, 2.4, 1.0), (94.7, 1.2, 3.5), (43.0, 1.6, 7.2), (21.3, 1.2, 15.4)),
    ("group", 20, 20): _row((308.7, 3.3, 1.0), (74.3, 1.7, 4.2), (31.0, 0.8, 10.0), (18.7, 1.7, 16.5)),
    ("group", 30, 20): _row((344.7, 4.6, 1.0), (85.7, 2.1, 4.0), (25.7, 1.7, 13.4), (13.0, 0.8, 26.5)),
    # group non-i.i.d. & client non-i.i.d.
    ("both", 10, 20): _row((363.0, 7.3, 1.0), (141.7, 2.9, 2.6), (83.7, 1.2, 4.3), (52.7, 1.2, 6.7)),
    ("both", 10, 30): _row(BEYOND, (127.7, 2.9, 3.9), (79.7, 1.7, 6.3), (38.7, 0.9, 12.9)),
    ("both", 10, 40): _row(BEYOND, (169.7, 5.2, 2.9), (106.3, 1.9, 4.7), (31.7, 0.5, 15.8)),
    ("both", 20, 20): _row(BEYOND, (113.3, 3.4, 4.4), (45.3, 1.2, 11.0), (25.0, 1.6, 20.0)),
    ("both", 30, 20): _row(BEYOND, (86.7, 2.4, 5.8), (50.7, 2.4, 9.9), (19.6, 0.5, 25.5)),
}

TEXT_DISAGREES = (
    "Section 5.2 speaks of speed-ups of 3.3 and 4.7 for the group i.i.d. case at (10, 20) and (10, 40); "
    "Table 1 itself has 3.2 and 6.7, which is what its rounds give."
)

WHY_FAR = {
    "client": (
        "Where groups are i.i.d., the paper's text divides the samples evenly over the groups first, which is done "
        "here; the code released with it fills all clients at once, each from a Dirichlet prior that is never "
        "flattened. On CIFAR-10 (5 seeds) clients are then 0.67 from the whole in total variation and groups 0.23, "
        "here 0.40 and 0.02: a harder split, in which groups differ too, so its rounds are more."
    ),
}
"""Known reasons for numbers far from the paper's, by distribution."""


def table1(panel: tuple[str, ...], method: str) -> Rounds | None:
    """Number of the paper for a case of Table 1, or None."""
    distribution, eh = panel
    e, _, h = eh.removeprefix("E").partition("H")
    return TABLE1.get((distribution, int(e), int(h)), {}).get(method)


def communication_ratio(e: int) -> float:
    """Bytes that MTGC sends per client and aggregation, as a multiple of HFedAvg (Appendix B)."""
    return (e + 1) / e
