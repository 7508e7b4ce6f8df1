"""Small modules of every kind that users bring, by name."""

from tests.engine.zoo import layers, networks, unusual
from tests.engine.zoo.entry import Entry

ZOO: dict[str, Entry] = {**layers.ZOO.entries, **networks.ZOO.entries, **unusual.ZOO.entries}
