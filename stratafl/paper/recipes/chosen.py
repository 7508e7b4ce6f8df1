"""FedProx's mu and FedDyn's alpha, which the paper does not name: as in the code released with it,
and the best here.

`stratafl reproduce search` trains the candidates below on CIFAR-10 (both levels non-i.i.d., a seed
of its own) and names the best of each; docs/results/README.md says whether that has been done, and
a test holds the values here to what its record says. Figure 3 has a line for either value.
"""

from __future__ import annotations

from typing import Any

RELEASED: dict[str, dict[str, Any]] = {
    "fedprox": {"mu": 0.0001},
    "feddyn": {"alpha": 0.01, "pull": "after_clip"},
}
"""The parameters in the code released with the paper."""
CHOSEN: dict[str, dict[str, Any]] = {
    "fedprox": {"mu": 0.1},
    "feddyn": {"alpha": 0.1},
}
"""The best of the search."""
CANDIDATES: dict[str, tuple[str, tuple[float, ...]]] = {
    "fedprox": ("mu", (0.0001, 0.001, 0.01, 0.1, 1.0)),
    "feddyn": ("alpha", (0.001, 0.01, 0.1, 1.0)),
}
