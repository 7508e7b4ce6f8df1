"""The networks of the experiments, a file for each, registered on import."""

from stratafl.models import cnn, logistic, lstm, mlp, resnet18_gn
from stratafl.models.registry import keep_names

keep_names()

__all__ = ["cnn", "logistic", "lstm", "mlp", "resnet18_gn"]
