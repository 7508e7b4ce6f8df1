"""`flower-supernode` that looks for messages more often: Flower's waits three seconds between two looks, and half a
second between two looks for a reply, which a tree pays at every level."""

from __future__ import annotations

import time
from types import SimpleNamespace

LONGEST = 0.1


def main() -> None:
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode

    patient = {**vars(time), "sleep": lambda seconds: time.sleep(min(seconds, LONGEST))}
    vars(start_client_internal)["time"] = SimpleNamespace(**patient)
    flower_supernode()


if __name__ == "__main__":
    main()
