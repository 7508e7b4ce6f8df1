"use strict";
// One tree: who belongs to whom, how many samples each leaf holds, and of which classes.

// Where each node lies: a node spans the nodes of the lowest drawn level below it.
function places(levels) {
  const last = levels.length - 1;
  const spans = levels.map((level) => level.names.map(() => [Infinity, -Infinity]));
  levels[last].names.forEach((_, node) => {
    for (let level = last, at = node; level >= 0; at = levels[level].parents[at], level -= 1) {
      const span = spans[level][at];
      span[0] = Math.min(span[0], node);
      span[1] = Math.max(span[1], node + 1);
    }
  });
  return spans;
}

function shareText(labels, classes) {
  const total = labels.reduce((sum, count) => sum + count, 0);
  const ranked = labels.map((count, number) => [count, number]).filter(([count]) => count > 0).sort((a, b) => b[0] - a[0]);
  const told = ranked.slice(0, 5).map(([count, number]) => `${plain(classes[number] ?? number)} ${Math.round((100 * count) / total)} %`);
  return told.join(", ") + (ranked.length > 5 ? `, ${ranked.length - 5} more` : "");
}

function nodeText(tree, level, node) {
  const here = tree.levels[level];
  const weight = level > 0 && here.weights[node] !== null ? `, weight ${here.weights[node].toPrecision(3)}` : "";
  return `<b>${plain(here.names[node])}</b><br>${here.samples[node].toLocaleString("en")} samples${weight}<br>${shareText(here.labels[node], tree.classes)}`;
}

// A label beside the chart takes a third of its width at most; hovering tells the whole.
function shortened(label, plot) {
  const letters = Math.max(4, Math.floor(plot.clientWidth / 3 / 8));
  const text = [...String(label)];
  return text.length > letters ? `${text.slice(0, letters - 1).join("")}…` : label;
}

function drawTree() {
  const { trees } = state.data;
  const plot = document.getElementById("tree");
  const chooser = document.getElementById("split");
  document.getElementById("tree-title").parentElement.hidden = trees.length === 0;
  if (!trees.length) return;
  state.split = Math.min(state.split, trees.length - 1);
  const names = trees.map(({ runs }) => (runs.length > 1 ? `${runs[0]} and ${runs.length - 1} more` : runs[0]));
  chooser.replaceChildren(...names.map((name, number) => element("option", { value: String(number), textContent: name })));
  chooser.value = String(state.split);
  const tree = trees[state.split];
  const { levels, classes } = tree;
  const last = levels.length - 1;
  const leaves = levels[last];
  const width = leaves.names.length;
  const spans = places(levels);
  const shades = [style("--band1"), style("--band2"), style("--band3")];
  const centre = leaves.names.map((_, node) => node + 0.5);

  const bands = levels.map((level, number) => ({
    type: "bar",
    x: spans[number].map(([from, to]) => (from + to) / 2),
    width: spans[number].map(([from, to]) => to - from),
    y: level.names.map(() => 1),
    base: level.names.map(() => last - number),
    text: level.names.map((name, node) => {
      const room = ((spans[number][node][1] - spans[number][node][0]) / width) * plot.clientWidth * 0.85;
      const short = name.split("/").pop();
      return short.length * 8 < room ? plain(short) : "";
    }),
    textposition: "inside",
    insidetextanchor: "middle",
    textangle: 0,
    insidetextfont: { color: style("--ink"), size: 12 },
    hovertext: level.names.map((_, node) => nodeText(tree, number, node)),
    hoverinfo: "text",
    marker: { color: shades[Math.min(number, shades.length - 1)], line: { color: style("--card"), width: width > 300 ? 0 : 1.5 } },
    yaxis: "y",
  }));
  const sizes = {
    type: "bar", x: centre, y: leaves.samples, width: leaves.names.map(() => (width > 300 ? 1 : 0.8)),
    marker: { color: style("--heat") }, hovertext: leaves.names.map((_, node) => nodeText(tree, last, node)), hoverinfo: "text", yaxis: "y2",
  };
  const shares = leaves.labels.map((counts) => {
    const total = Math.max(1, counts.reduce((sum, count) => sum + count, 0));
    return counts.map((count) => count / total);
  });
  const mix = {
    type: "heatmap", x: centre, y: classes.map((_, number) => number), yaxis: "y3",
    z: classes.map((_, number) => shares.map((share) => share[number] || 0)),
    showscale: !TOUCH, zmin: 0, zmax: 1, colorscale: [[0, style("--card")], [1, style("--heat")]], xgap: width > 100 ? 0 : 1, ygap: classes.length > 40 ? 0 : 1,
    colorbar: { thickness: 8, len: 0.42, y: 0.0, yanchor: "bottom", tickformat: ".0%", outlinewidth: 0, tickvals: [0, 0.5, 1], xpad: 4 },
    hoverinfo: "text",
    hovertext: width * classes.length > 40000 ? undefined : classes.map((label, number) =>
      leaves.names.map((name, node) => `<b>${plain(name)}</b><br>class ${plain(label)}: ${leaves.labels[node][number] ?? 0} of ${leaves.samples[node]}`)),
  };
  const quiet = { showgrid: false, zeroline: false, automargin: true, ticks: "" };
  const few = classes.length <= 30;
  plot.style.height = `${190 + 44 * levels.length + (few ? 20 * classes.length : 340)}px`;
  rooms.observe(plot);
  Plotly.react(plot, [...bands, sizes, mix], layout(plot, {
    uirevision: `tree ${state.split}`,
    barmode: "overlay",
    bargap: 0,
    uniformtext: { mode: "hide", minsize: 10 }, // rather no name than one that nobody can read
    hovermode: "closest",
    margin: { l: 56, r: 10, t: TOUCH ? 14 : 32, b: 34 },
    xaxis: { ...quiet, range: [0, width], showticklabels: false, title: { text: tree.left_out.length ? "nodes" : "clients", standoff: 6 }, anchor: "y3" },
    yaxis: { ...quiet, domain: [0.78, 1], fixedrange: true, tickvals: levels.map((_, number) => last - number + 0.5),
      ticktext: levels.map((_, number) => (number === 0 ? "root" : `level ${number}`)) },
    yaxis2: { ...quiet, domain: [0.53, 0.74], fixedrange: true, nticks: 4, showgrid: true, gridcolor: style("--grid"), title: { text: "samples", standoff: 6 } },
    yaxis3: { ...quiet, domain: [0, 0.49], fixedrange: true, autorange: "reversed", title: { text: "class", standoff: 6 },
      ...(few ? { tickvals: classes.map((_, number) => number), ticktext: classes.map((label) => plain(shortened(label, plot))) } : { showticklabels: false }) },
  }), CONFIG);
  const missing = tree.left_out.length ? ` ${tree.left_out.join(" and ").toLocaleString()} nodes further down are too many to draw.` : "";
  document.getElementById("tree-note").textContent =
    `Top: the tree, root first. Middle: samples of each. Bottom: which share of its samples is of which class.${missing}`;
}
