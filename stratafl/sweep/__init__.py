"""Many runs at once: a plan of named configs, worker processes that do them, and a table over seeds."""

from stratafl.sweep.plan import Entry, Plan
from stratafl.sweep.pool import Outcome, run_all
from stratafl.sweep.table import Row, table

__all__ = ["Entry", "Outcome", "Plan", "Row", "run_all", "table"]
