"""Client app: one step of SGD on the node's own data."""

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from .model import build

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    data = np.load(str(context.node_config["data"]))
    inputs, targets = torch.from_numpy(data["inputs"]), torch.from_numpy(data["targets"])
    model = build()
    arrays: ArrayRecord = message.content["arrays"]
    model.load_state_dict(arrays.to_torch_state_dict())
    batch = torch.randperm(len(inputs))[:20]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
    optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(inputs)})}
    return Message(RecordDict(content), reply_to=message)
