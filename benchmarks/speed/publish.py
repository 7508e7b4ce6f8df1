"""Publication of the measured speeds in the documents: figure, table, summary, and the rates of
estimates.

    python -m benchmarks.speed.publish

reads benchmarks/results/h200_*.json, draws docs/engine.png and replaces the text between the marks
in docs/engine.md, and the table in papers/harness/estimate.py. It needs no GPU. A ratio always
compares two contenders of the same precision.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.speed.results import EnginePrecision, ratios
from stratafl.base.plotting import SLATE, VERMILION, pyplot, save
from stratafl.engine.precision import PRECISIONS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
RATES = ROOT / "papers" / "harness" / "estimate.py"
BEGIN, END = "<!-- measured: python -m benchmarks.speed.publish -->", "<!-- end of measured -->"
STEPS = 20
"""Steps between two synchronisations, unless a row of the table says otherwise."""
MODELS = {
    "cnn": "CNN, CIFAR-10 shapes, flips and crops",
    "mlp": "MLP 784-200-200-10",
    "resnet18_gn": "ResNet-18-GN, CIFAR-100 shapes",
    "lstm": "LSTM, Shakespeare shapes",
    "cnn_1000_clients": "CNN, 1,000 clients with their MTGC state",
    "cnn_10000_clients": "CNN, 10,000 clients with their MTGC state ({gib:.0f} GiB)",
}
WAYS = {
    "plain loop": "plain loop",
    "graphed loop": "plain loop, CUDA graph",
    "vmap": "`torch.func.vmap`, eager",
    "graphed vmap": "`torch.func.vmap`, CUDA graph",
    "compiled vmap": "`torch.func.vmap`, compiled, CUDA graph",
    "jax": "`jax.vmap`, compiled",
    "stacked": "stratafl",
}
SHOWN_PRECISIONS = {"tf32": "tf32, float32 in memory", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
"""Precisions by title, in the order of the table."""
PICTURED = ("tf32", "bf16")


class BenchmarkResult(NamedTuple):
    """Client-steps per second, and their conditions, from one file of results."""

    client_steps: dict[EnginePrecision, float]
    """Client-steps per second."""
    steps: dict[EnginePrecision, int]
    """Steps between two synchronisations."""
    peak_bytes: int
    """Largest peak of GPU memory of all contenders."""
    torch: str
    commit: str
    """Commit that was measured."""

    @classmethod
    def read(cls, name: str) -> BenchmarkResult:
        record = json.loads((RESULTS / f"h200_{name}.json").read_text())
        rows: dict[EnginePrecision, dict[str, Any]] = {(row["engine"], row["precision"]): row for row in record["rows"]}
        return cls(
            {way: row["client_steps"] for way, row in rows.items()},
            {way: row.get("steps", record["steps"]) for way, row in rows.items()},
            max(row["peak_bytes"] or 0 for row in rows.values()),
            record["torch"].partition("+")[0],
            record["environment"]["commit"],
        )

    def times(self, other: str, precision: str) -> str:
        """Speed-up of the stacked engine over another contender, as text."""
        ratio = ratios(self.client_steps)[f"stacked:{precision}"][other]
        return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"


def claim(cnn: BenchmarkResult) -> str:
    """Summary for docs/engine.md that compares with baselines of the same precision.

    The plain loop is named as one that waits for the host; the others do not, as ours does not.
    """
    names = {
        "plain loop": "a plain PyTorch loop, which waits for the host",
        "graphed loop": "that loop in a CUDA graph",
        "graphed vmap": "`torch.func.vmap` in a CUDA graph",
        "compiled vmap": "`torch.func.vmap`, compiled, in a CUDA graph",
        "jax": "compiled JAX",
    }
    compared = {way: name for way, name in names.items() if (way, "tf32") in cnn.client_steps}
    speedups = [f"{cnn.times(way, 'tf32')} times as fast as {name}" for way, name in compared.items()]
    tf32, bf16 = (f"{round(cnn.client_steps['stacked', kind], -2):,.0f}" for kind in ("tf32", "bf16"))
    sentence = (
        f"**{tf32} client-steps per second in tf32, and {bf16} in bf16**, on one H200. A client-step is one step of "
        "SGD of one client, here of the paper's CIFAR-10 CNN with batch size 50; it includes flips and crops, "
        f"corrections, clipping, update and synchronisation. In tf32, stratafl is {', '.join(speedups[:-1])}, and "
        f"{speedups[-1]}. (PyTorch {cnn.torch}, commit {cnn.commit[:7]}.)"
    )
    return textwrap.fill(sentence, 100, break_on_hyphens=False, break_long_words=False)


def table() -> str:
    """Table for docs/engine.md, with a row for each model and precision."""
    every_model = {name: BenchmarkResult.read(name) for name in MODELS}
    measured_ways = {way for measured in every_model.values() for way, _ in measured.client_steps}
    ways = {way: named for way, named in WAYS.items() if way in measured_ways}
    lines = [f"| | precision | {' | '.join(ways.values())} |", f"|{'---|' * (2 + len(ways))}"]
    for name, title in MODELS.items():
        measured = every_model[name]
        title = title.format(gib=measured.peak_bytes / 2**30)
        for precision in SHOWN_PRECISIONS:
            if ("stacked", precision) not in measured.client_steps:
                continue
            every = measured.steps["stacked", precision]
            kind = precision if every == STEPS else f"{precision}, a meeting every {every} steps"
            cells = [title, kind, *(_cell(measured, way, precision) for way in ways)]
            lines.append("|" + "".join(f" {cell} |" if cell else " |" for cell in cells))
            title = ""
    return "\n".join(lines)


def _cell(measured: BenchmarkResult, way: str, precision: str) -> str:
    speed = measured.client_steps.get((way, precision))
    if speed is None:
        return ""
    return f"**{speed:,.0f}**" if way == "stacked" else f"{speed:,.0f} ({measured.times(way, precision)}x)"


def picture(cnn: BenchmarkResult, path: Path) -> None:
    """Draw one panel for each precision, since only bars of one precision can be compared."""
    panels = {kind: [way for way in WAYS if (way, kind) in cnn.client_steps] for kind in PICTURED}
    plt = pyplot()
    figure, all_axes = plt.subplots(
        len(panels), 1, figsize=(7.2, 1.5 + 0.36 * sum(map(len, panels.values()))), layout="constrained", sharex=True,
        gridspec_kw={"height_ratios": [len(ways) + 0.4 for ways in panels.values()]},
    )  # fmt: skip
    for axes, (kind, ways) in zip(all_axes, panels.items(), strict=True):
        speeds = [cnn.client_steps[way, kind] for way in ways]
        colours = [VERMILION if way == "stacked" else SLATE for way in ways]
        bars = axes.barh([WAYS[way].replace("`", "") for way in ways], speeds, color=colours)
        suffixes = ["" if way == "stacked" else f"   stratafl: {cnn.times(way, kind)}x" for way in ways]
        labels = [f"{speed:,.0f}{ratio}" for speed, ratio in zip(speeds, suffixes, strict=True)]
        axes.bar_label(bars, labels, padding=4, fontsize=9)
        axes.set_title(f"all in {SHOWN_PRECISIONS[kind]}", loc="left", fontsize=9, color="#555555")
        axes.set_ylim(len(ways) - 0.5, -0.6)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(left=False, bottom=False, labelbottom=False)
        axes.set_xlim(0, 1.15 * max(cnn.client_steps.values()))
    title = "Client-steps per second, whole training loop, one H200\nCNN, CIFAR-10 shapes, 100 clients, batch 50"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    save(figure, path)


def marked(text: str, measured: str) -> str:
    """Replace the text between the marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"a document has lost its marks: {BEGIN} {END}")
    return f"{before}{BEGIN}\n{measured}\n{END}{after}"


def with_rates(source: str) -> str:
    """Source of `estimate.py` with the measured client-steps per second."""
    before, begin, rest = source.partition("\nH200 = {\n")
    old, end, after = rest.partition("\n}\n")
    lines = []
    for name in (line.split('"')[1] for line in old.splitlines()):
        speeds = BenchmarkResult.read(name).client_steps
        rates = [f'"{kind}": {round(speeds["stacked", kind]):_}' for kind in PRECISIONS if ("stacked", kind) in speeds]
        lines.append(f'    "{name}": {{{", ".join(rates)}}},')
    return before + begin + "\n".join(lines) + end + after


def documents() -> dict[Path, str]:
    """Complete new text of each document."""
    measurements = {
        ROOT / "docs" / "engine.md": f"\n{claim(BenchmarkResult.read('cnn'))}\n\n{table()}\n",
    }
    written = {path: marked(path.read_text(), measured) for path, measured in measurements.items()}
    return {**written, RATES: with_rates(RATES.read_text())}


def main() -> None:
    for path, text in documents().items():
        path.write_text(text)
    picture(BenchmarkResult.read("cnn"), ROOT / "docs" / "engine.png")


if __name__ == "__main__":
    main()
