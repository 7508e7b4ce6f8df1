"""Server app: Flower's own FedAvg, which writes the end times of the rounds to a file."""

import json
import time
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from .model import build

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    torch.set_num_threads(1)
    settings = context.run_config
    data = np.load(str(settings["data"]))
    inputs, targets = torch.from_numpy(data["inputs"]), torch.from_numpy(data["targets"])
    model, ends = build(), Path(str(settings["ends"]))
    nodes, moments = int(settings["nodes"]), []

    def evaluated(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            accuracy = (model(inputs).argmax(dim=1) == targets).float().mean()
        moments.append(time.monotonic())
        return MetricRecord({"accuracy": float(accuracy)})

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    strategy.start(grid, ArrayRecord(model.state_dict()), int(settings["rounds"]), evaluate_fn=evaluated)
    done = ends.with_suffix(".partial")
    done.write_text(json.dumps(moments))
    done.rename(ends)
