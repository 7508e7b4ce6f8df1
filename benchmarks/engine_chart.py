"""The measured throughput of the engines as a bar chart.

python -m benchmarks.engine_chart
"""

from __future__ import annotations

import json
from pathlib import Path

from stratafl.plots import COLOURS, pyplot, save

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    measured = {
        (row["engine"], row["precision"]): row["client_steps"]
        for row in json.loads((RESULTS / "h200_cnn.json").read_text())["rows"]
    }
    shown = {
        "plain PyTorch loop": measured["plain loop", "tf32"],
        "loop in a CUDA graph": measured["graphed loop", "tf32"],
        "torch.func.vmap": measured["vmap", "tf32"],
        "jax.vmap, compiled": measured["jax", "tf32"],
        "stratafl, fp32 storage": measured["stacked", "tf32"],
        "stratafl, 16-bit products": measured["stacked", "fp16"],
    }
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.2, 2.9), layout="constrained")
    names = list(shown)[::-1]
    colours = [COLOURS[3] if name.startswith("stratafl") else COLOURS[0] for name in names]
    bars = axes.barh(names, [shown[name] for name in names], color=colours)
    axes.bar_label(bars, [f"{shown[name]:,.0f}" for name in names], padding=4, fontsize=9)
    axes.set_xlim(0, 1.15 * max(shown.values()))
    told = "Client-steps per second, whole training loop, one H200\nCNN, CIFAR-10 shapes, 100 clients, batch 50"
    axes.set_title(told, loc="left", fontsize=10)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(left=False)
    axes.set_xticks([])
    save(figure, Path("docs/engine.png"))


if __name__ == "__main__":
    main()
