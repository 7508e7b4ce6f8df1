"""The networks of the experiments, a file for each, registered on import."""

from stratafl.models import cnn, logistic, lstm, mlp, resnet18_gn

__all__ = ["cnn", "logistic", "lstm", "mlp", "resnet18_gn"]
