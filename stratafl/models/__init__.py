"""Model architectures of the experiments, registered on import."""

from stratafl.models import networks
from stratafl.models.registry import keep_names

keep_names()

__all__ = ["networks"]
