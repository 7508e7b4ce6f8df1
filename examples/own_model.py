"""The Python interface: one's own module and data on a tree with named, unequal groups."""

import torch
from torch import nn

from stratafl import Client, Data, Tree, simulate

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(600, 20, generator=generator)
targets = (inputs @ torch.randn(20, 3, generator=generator)).argmax(dim=1)

tree = {"europe": {"paris": 3, "rome": 2}, "asia": {"tokyo": 4, "seoul": ["lab", "clinic"]}}
by_class = targets[:500].argsort()  # every client sees one or two of the three classes
partition = [part.numpy() for part in by_class.chunk(11)]

simulation = simulate(
    lambda: nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 3)),
    Data((inputs, targets), partition=partition, test=(inputs[500:], targets[500:])),
    Tree(tree, weights="samples"),
    "mtgc",
    rounds=8,
    schedule=[2, 3, 5],
    client=Client(0.2, clip_norm=10.0),
)
for result in simulation:
    print(f"round {result.round}: accuracy {result.metrics['accuracy']:.3f}")

outcome = simulation.result()
print("seoul's model:", outcome.model_of("asia/seoul"))
for rows in outcome.corrections:
    if rows is not None:
        print("size of each correction of a level:", rows.norm(dim=1))
print("the lab sent and received", outcome.communication.client(9).bytes, "bytes")
