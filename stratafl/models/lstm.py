"""The recurrent network of the experiments on Shakespeare."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from stratafl.base.errors import InvalidInput
from stratafl.models.registry import Shape, check_sizes, register


class Recurrent(nn.LSTM):
    """`nn.LSTM` written out step by step: the stacked engine has kernels for a layer of this kind,
    and a mapping over clients by `torch.func` does not come upon cuDNN's layer."""

    def forward(self, x_BTF: Tensor) -> Tensor:  # type: ignore[override]
        for layer in range(self.num_layers):
            weight_in, weight_state, bias_in, bias_state = (
                getattr(self, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            gates_BTG = functional.linear(x_BTF, weight_in, bias_in + bias_state)
            hidden = torch.zeros_like(gates_BTG[:, 0, : self.hidden_size])
            cell = torch.zeros_like(hidden)
            outputs = []
            for gates in gates_BTG.unbind(1):
                enter, forget, new, leave = (gates + functional.linear(hidden, weight_state)).chunk(4, dim=-1)
                cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
                hidden = leave.sigmoid() * cell.tanh()
                outputs.append(hidden)
            x_BTF = torch.stack(outputs, dim=1)
        return x_BTF


class NextCharacter(nn.Module):
    """Embedding, recurrent layers, and a guess at what follows the sequence."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int, classes: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.recurrent = Recurrent(embedding, hidden, layers, batch_first=True)
        self.output = nn.Linear(hidden, classes)

    def forward(self, codes_BT: Tensor) -> Tensor:
        return self.output(self.recurrent(self.embedding(codes_BT.long()))[:, -1])


@register(example=((80,), 80))
def lstm(
    input_shape: Shape,
    classes: int,
    vocabulary: int | None = None,
    embedding: int = 8,
    hidden: int = 100,
    layers: int = 2,
) -> nn.Module:
    """Two-layer LSTM that predicts the next character."""
    if len(input_shape) != 1:
        raise InvalidInput("input_shape", tuple(input_shape), "lstm takes sequences: (length,)")
    vocabulary = classes if vocabulary is None else vocabulary
    check_sizes("vocabulary, embedding, hidden, layers", (vocabulary, embedding, hidden, layers))
    return NextCharacter(vocabulary, embedding, hidden, layers, classes)
