"""The pictures of docs/concepts.md: run `python docs/pictures/draw.py`.

Each picture is one SVG that follows the light or dark mode of the reader's screen. The picture of
drift is computed: averaging and MTGC on two quadratics in each of two groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
Point = tuple[float, float]
STYLE = """
text { font-family: system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif; font-size: 15px }
.card { fill: #f6f7fb; stroke: #dfe3ec }
.ink { fill: #20242d } .soft { fill: #5b6474 } .small { font-size: 13px } .bold { font-weight: 600 }
.line { stroke: #8a93a5; stroke-width: 1.6; fill: none } .faint { stroke: #c9cfdb; stroke-width: 1; fill: none }
.root { fill: #3f51b5 } .one { fill: #00796b } .two { fill: #c75300 } .white { fill: #ffffff }
.sroot { stroke: #3f51b5; stroke-width: 2.4; fill: none } .sone { stroke: #00796b; stroke-width: 2; fill: none }
.stwo { stroke: #c75300; stroke-width: 2; fill: none } .spaper { stroke: #f6f7fb; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) {
.card { fill: #20242d; stroke: #39404e }
.ink { fill: #eceff6 } .soft { fill: #a9b2c3 }
.line { stroke: #8a93a5 } .faint { stroke: #414a5a }
.root { fill: #8c9eff } .one { fill: #4db6ac } .two { fill: #ffa25e } .white { fill: #16181d }
.sroot { stroke: #8c9eff } .sone { stroke: #4db6ac } .stwo { stroke: #ffa25e } .spaper { stroke: #20242d }
}
"""
MARKERS = "".join(
    f'<marker id="{name}" viewBox="0 0 10 10" refX="8.5" refY="5" markerWidth="7" markerHeight="7" '
    f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" class="{fill}"/></marker>'
    for name, fill in (("to_root", "root"), ("to_one", "one"), ("to_two", "two"), ("to", "soft"))
)


class Picture:
    """Builder of an SVG file."""

    def __init__(self, width: int, height: int, title: str):
        self.size, self.title = (width, height), title
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "ink", anchor: str = "middle") -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{words}</text>')

    def dot(self, x: float, y: float, radius: float, kind: str) -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{kind}"/>')

    def line(self, points: Sequence[Point], kind: str = "line", head: str = "", dashed: bool = False) -> None:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        more = (f' marker-end="url(#{head})"' if head else "") + (' stroke-dasharray="5 5"' if dashed else "")
        self.parts.append(f'<path d="M{path}" class="{kind}"{more}/>')

    def box(self, x: float, y: float, width: float, height: float, kind: str = "faint") -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="{kind}"/>')

    def save(self, name: str) -> None:
        width, height = self.size
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
        card = f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="10" class="card"/>'
        parts = [head, f"<title>{self.title}</title>", f"<style>{STYLE}</style>", f"<defs>{MARKERS}</defs>", card]
        (HERE / name).write_text("\n".join([*parts, *self.parts, "</svg>"]) + "\n")


def tree() -> None:
    picture = Picture(760, 330, "A tree of depth 2: a root, two groups, six clients, and two levels of edges")
    root, groups = (360.0, 55.0), [(215.0, 155.0), (505.0, 155.0)]
    for group, (x, y) in enumerate(groups):
        color = ("one", "two")[group]
        picture.line([root, (x, y)], "sroot")
        for client in (-1, 0, 1):
            picture.line([(x, y), (x + 88 * client, 262)], f"s{color}")
            picture.dot(x + 88 * client, 262, 15, color)
        picture.dot(x, y, 19, color)
    picture.dot(*root, 22, "root")
    picture.text(396, 50, "root", "ink bold", "start")
    picture.text(396, 69, "the cloud", "soft small", "start")
    picture.text(541, 150, "aggregator of a group", "ink bold", "start")
    picture.text(541, 169, "a city, an edge server", "soft small", "start")
    picture.text(360, 305, "clients: each with its own data, which never leaves it", "ink")
    for y, words in ((60, "level 0"), (160, "level 1"), (267, "level 2")):
        picture.text(20, y, words, "soft small", "start")
    picture.text(250, 98, "edge level 1", "root bold", "end")
    picture.text(250, 116, "one rule, one period", "soft small", "end")
    picture.text(590, 205, "edge level 2", "two bold", "start")
    picture.text(590, 223, "one rule, one period", "soft small", "start")
    picture.save("tree.svg")


def periods() -> None:
    picture = Picture(
        760, 285, "One global round with periods [3, 4]: steps, group rounds, and a synchronisation at the root"
    )
    left, step, top = 130.0, 47.0, 225.0
    for y, words in ((70, "root"), (145, "groups"), (225, "clients")):
        picture.text(20, y + 5, words, "ink bold", "start")
        picture.line([(left - 20, y), (left + 12 * step + 25, y)], "faint")
    for number in range(1, 13):
        x = left + number * step
        picture.box(x - step + 4, top - 11, step - 8, 22, "one")
        if number % 4 == 0:
            picture.line([(x, top - 13), (x, 158)], "sone", "to_one")
            picture.dot(x, 145, 9, "one")
    end = left + 12 * step
    picture.line([(end, 134), (end, 84)], "sroot", "to_root")
    picture.dot(end, 70, 11, "root")
    picture.text(left + 2 * step, 258, "4 steps of SGD", "soft small")
    picture.text(left + 4 * step + 14, 183, "the clients of a group synchronise", "soft small", "start")
    picture.text(end - 16, 104, "after 3 group rounds the root synchronises", "soft small", "end")
    picture.text(left - 20, 32, "periods = [3, 4]", "ink bold", "start")
    picture.text(left + 125, 32, "one global round = 3 rounds of the groups = 12 steps of a client", "soft", "start")
    picture.text(end + 22, 258, "time", "soft small", "end")
    picture.save("periods.svg")


def meeting() -> None:
    picture = Picture(760, 300, "A synchronisation: children send, the parent aggregates, children get its model")
    titles = ("1. children send", "2. the parent merges", "3. children get its model")
    notes = (
        ("up: the model, and what", "else the rule sends"),
        ("merge: the weighted mean,", "or a step towards it"),
        ("down: the difference from the", "mean updates the correction"),
    )
    for number, (title, note) in enumerate(zip(titles, notes, strict=True)):
        x = 130.0 + 250 * number
        picture.text(x, 36, title, "ink bold")
        for child in (-1, 0, 1):
            position = (x + 70 * child, 195.0)
            if number == 0:
                picture.line([(position[0] - 0.12 * 70 * child, 177), (x + 18 * child, 107)], "sone", "to_one")
            elif number == 1:
                picture.line([position, (x, 90)], "faint")
            else:
                picture.line([(x + 14 * child, 108), (position[0] - 0.12 * 70 * child, 175)], "sroot", "to_root")
            picture.dot(*position, 15, "one" if number < 2 else "root")
            if number == 2:
                picture.line(
                    [(position[0], 216), (position[0] - 20 * child + (14 if child == 0 else 0), 232)], "stwo", "to_two"
                )
        picture.dot(x, 88, 20, "one" if number == 0 else "root")
        for line, words in enumerate(note):
            picture.text(x, 262 + 19 * line, words, "soft small")
    for x in (255, 505):
        picture.line([(x, 55), (x, 240)], "faint", dashed=True)
    picture.save("meeting.svg")


# -- computed: two groups of two clients, each with a quadratic of its own ------------------------

CENTRES = np.array([[[-3.4, 1.0], [0.6, 2.8]], [[3.2, 0.6], [0.4, -3.6]]])
"""Minimum of each client's loss: group, client, coordinate."""
CURVES = np.array([[[1.0, 0.3], [0.25, 0.9]], [[0.3, 0.7], [0.8, 0.35]]])
"""Curvature of each client's loss, by coordinate."""
OPTIMUM = (CURVES * CENTRES).sum(axis=(0, 1)) / CURVES.sum(axis=(0, 1))
START = np.array([-2.6, -3.2])
E, H, RATE = 3, 8, 0.12


def paths(corrects: bool, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """The root's last model, and the clients' paths of the last round (group, client, step)."""
    root, y_G = START, np.zeros((2, 1, 2))
    for _ in range(rounds):
        group_G = np.repeat(root[None, None], 2, axis=0)
        z_GC = np.zeros((2, 2, 2))
        walked = []
        for _ in range(E):
            x_GC = np.repeat(group_G, 2, axis=1)
            walked.append(x_GC.copy())
            for _ in range(H):
                x_GC = x_GC - RATE * (CURVES * (x_GC - CENTRES) + corrects * (y_G + z_GC))
                walked.append(x_GC.copy())
            group_G = x_GC.mean(axis=1, keepdims=True)
            z_GC = z_GC + (x_GC - group_G) / (H * RATE)
        root = group_G.mean(axis=0)[0]
        y_G = y_G + (group_G - root) / (E * H * RATE)
    return root, np.stack(walked, axis=2)


def plane(left: float, top: float, scale: float) -> Callable[[np.ndarray], Point]:
    return lambda point: (left + scale * (float(point[0]) + 4.2), top + scale * (3.6 - float(point[1])))


def drift() -> None:
    picture = Picture(760, 425, "Paths of four clients in one global round, without and with corrections")
    for number, (title, corrects) in enumerate((("HFedAvg: averaging alone", False), ("MTGC: corrected", True))):
        place = plane(20 + 375 * number, 55, 43)
        root, walked = paths(corrects, rounds=12)
        picture.text(190 + 375 * number, 36, title, "ink bold")
        for group in range(2):
            for client in range(2):
                color = ("one", "two")[group]
                picture.line([place(point) for point in walked[group, client]], f"s{color}")
                x, y = place(CENTRES[group, client])
                picture.line([(x - 5, y - 5), (x + 5, y + 5)], f"s{color}")
                picture.line([(x - 5, y + 5), (x + 5, y - 5)], f"s{color}")
        x, y = place(OPTIMUM)
        picture.dot(x, y, 9, "white")
        picture.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" class="sroot"/>')
        picture.dot(*place(root), 5.5, "root")
        miss = float(np.linalg.norm(root - OPTIMUM))
        picture.text(190 + 375 * number, 405, f"after 12 rounds {miss:.2f} from the optimum", "soft small")
    picture.line([(380, 20), (380, 410)], "faint", dashed=True)
    picture.save("drift.svg")


def corrections() -> None:
    picture = Picture(760, 300, "Directions of a client, its group and all clients, and the corrections between them")
    start = (320.0, 235.0)
    client, group, total = (70.0, 205.0), (115.0, 90.0), (285.0, 70.0)
    for end, color in ((client, "two"), (group, "one"), (total, "root")):
        picture.line([start, end], f"s{color}", f"to_{color}")
    for (x0, y0), (x1, y1) in ((client, group), (group, total)):
        between = [(x0 + share * (x1 - x0), y0 + share * (y1 - y0)) for share in (0.06, 0.94)]
        picture.line(between, "line", "to", dashed=True)
    picture.dot(*start, 6, "ink")
    picture.text(start[0], start[1] + 26, "the model", "ink bold")
    picture.text(client[0] + 20, client[1] + 30, "the client", "two")
    picture.text(group[0] - 10, group[1] - 14, "its group", "one")
    picture.text(total[0] + 10, total[1] - 14, "all clients", "root")
    picture.text(78, 148, "z", "ink bold")
    picture.text(196, 66, "y", "ink bold")
    picture.text(20, 34, "Descent directions of", "soft small", "start")
    legend = (
        ("z", "the client's correction", "from its own direction to its group's"),
        ("y", "the group's correction", "from its direction to that of all clients"),
    )
    for number, (name, title, words) in enumerate(legend):
        picture.text(430, 85 + 55 * number, name, "ink bold", "start")
        picture.text(452, 85 + 55 * number, title, "ink", "start")
        picture.text(452, 105 + 55 * number, words, "soft small", "start")
    for number, words in enumerate(("With both, a client steps in the", "direction of all clients. Over siblings,")):
        picture.text(430, 205 + 20 * number, words, "soft small", "start")
    picture.text(430, 245, "corrections sum to zero.", "soft small", "start")
    picture.save("corrections.svg")


def main() -> None:
    for draw in (tree, periods, meeting, drift, corrections):
        draw()


if __name__ == "__main__":
    main()
