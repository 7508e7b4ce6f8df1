"""Notes of six clinics, a transformer with dropout that returns a table, AdamW and F1.

python examples/own_text.py            # kill it at any moment, and start it again: the same bits
stratafl run examples/own_text.toml    # the same from a config
stratafl report                        # both on one page
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from stratafl import Client, Data, simulate

WORDS, LENGTH = 16, 12
"""Codes there are, 0 for none, and of a note at most; 1 to 5 are calm words, 6 to 10 are not."""


class Notes(Dataset):
    """One clinic's notes as a tokenizer would give them, and whether they are urgent."""

    def __init__(self, clinic: int, count: int = 60):
        draw = torch.Generator().manual_seed(clinic)
        self.codes = torch.randint(1, WORDS, (count, LENGTH), generator=draw)
        lengths = torch.randint(4, LENGTH + 1, (count, 1), generator=draw)
        self.mask = (torch.arange(LENGTH) < lengths).long()
        alarm = ((self.codes > 5) & (self.codes <= 10)).long() - (self.codes <= 5).long()
        self.labels = ((alarm * self.mask).sum(dim=1) > clinic % 3 - 1).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input_ids": self.codes[number], "attention_mask": self.mask[number], "label": self.labels[number]}


class Classifier(nn.Module):
    def __init__(self, width: int = 32, classes: int = 2):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, None, False), nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.words(input_ids) + self.places(torch.arange(LENGTH, device=input_ids.device))
        x = self.encoder(x, src_key_padding_mask=attention_mask == 0)
        return {"logits": self.head(x[:, 0])}


def load(clients: int = 6) -> dict[str, Any]:
    return {"train": [Notes(clinic) for clinic in range(clients)], "test": Notes(100, 300)}


if __name__ == "__main__":
    notes, client = load(), Client(0.003, batch_size=20, clip_norm=1.0, optimizer="adamw")
    run = simulate(
        Classifier, Data(notes["train"], test=notes["test"]), "2x3", schedule=[2, 5], client=client,
        evaluation=["f1"], rounds=12, save="runs/own_text")  # fmt: skip
    print(run.run().history[-1].metrics)
