"""One thread a test process: the suite runs on several, and small operations gain nothing from more."""

import torch

torch.set_num_threads(1)
