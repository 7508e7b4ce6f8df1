"""The settings the paper leaves open, each chosen once and used everywhere.

`stratafl reproduce search` trains the candidates below on CIFAR-10 (both levels non-i.i.d., a seed of its own) and
names the best of each; docs/results/README.md says whether that has been done, and a test holds the values here to what
its record says.
"""

from __future__ import annotations

from typing import Any

CHOSEN: dict[str, dict[str, Any]] = {
    "fedprox": {"mu": 0.1},
    "feddyn": {"alpha": 0.1},
}
CANDIDATES: dict[str, tuple[str, tuple[float, ...]]] = {
    "fedprox": ("mu", (0.001, 0.01, 0.1, 1.0)),
    "feddyn": ("alpha", (0.001, 0.01, 0.1, 1.0)),
}
