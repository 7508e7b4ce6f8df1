"use strict";
// Which charts there are: a metric's, a level's drift, and what is known over the nodes of a level.

function lineOf(curve, name, label, number, width, dead) {
  const spread = curve.spread[name];
  const edge = (sign) => curve.y[name].map((value, place) => (value === null || spread[place] === null ? null : value + sign * spread[place]));
  return { label, number, width, dead, x: curve.x[state.axis], y: curve.y[name], ...(spread ? { low: edge(-1), high: edge(1) } : {}) };
}

// Everything to draw for one value: a mean with its band for each setting, or every run.
function linesOf(name) {
  const found = [];
  state.data.settings.forEach((setting, number) => {
    if (state.hidden.has(setting.label)) return;
    const isMetric = !name.startsWith("drift.");
    if (state.view === "mean") {
      const dead = setting.runs.some((run) => run.diverged !== null);
      if (setting.mean.y[name]) found.push(lineOf(setting.mean, name, setting.label, number, 2.2, dead && isMetric));
      return;
    }
    for (const run of setting.runs) {
      const label = setting.runs.length > 1 ? run.title : setting.label;
      if (run.curve.y[name]) found.push(lineOf(run.curve, name, label, number, 1.4, run.diverged !== null && isMetric));
    }
  });
  return found;
}

function xAxis() {
  const told = { rounds: (value) => `round ${short(value, 6)}`, steps: (value) => `${short(value, 6)} local steps`, bytes: (value) => `${bytesText(value)} per client`, seconds: (value) => `${short(value, 4)} s`, cost: (value) => short(value, 4) };
  // an axis of a network is named after what it counts: "seconds on NAME", "cost on NAME"
  const kind = state.axis.split(" on ")[0];
  return { title: state.data.axes[state.axis], format: AXIS_FORMATS[kind], told: told[kind], log: state.logX, zero: !state.logX && state.axis !== "rounds", whole: state.axis === "rounds" };
}

// A row's width is shared by the cards in it, so all of them stand before the first chart is measured.
function drawCards(id, cards) {
  const host = byId(id);
  const figures = cards.map((shown) => byId(shown.id) || card(shown.id));
  for (const old of [...host.children]) if (!figures.includes(old) && old.lastChild) rooms.unobserve(old.lastChild instanceof Element ? old.lastChild : old);
  const wanted = figures.length ? figures : [element("p", { className: "quiet", textContent: "Nothing was recorded yet." })];
  // a chart that stays where it is keeps what the pointer is doing in it
  const same = wanted.length === host.children.length && wanted.every((each, place) => host.children[place] === each);
  if (!same) host.replaceChildren(...wanted);
  cards.forEach((shown, number) => drawCard(figures[number], shown));
}

function card(id) {
  const save = element("button", { type: "button", className: "save", textContent: "SVG", title: "Save this chart as a file" });
  const figure = element("figure", { id, className: "card" }, element("figcaption", {}, element("span"), save), element("div", { className: "plot" }));
  save.addEventListener("click", () => saveChart(figure));
  return figure;
}

function drawCard(figure, { id, title, note = "", name, yAxis, goals = [] }) {
  figure.querySelector("figcaption span").replaceChildren(title, ...(note ? [element("small", { textContent: note })] : []));
  // zoom is kept while new rounds come in, and given up when another axis is chosen
  lineChart(figure.lastChild, { id, title, goals, lines: linesOf(name), axes: { x: xAxis(), y: yAxis }, zoomKey: `${state.axis} ${state.logX}` });
}

function metricAxis(metric, log) {
  const format = metric.percent ? percentText : short;
  const arrow = metric.better === "higher" ? "higher is better" : "lower is better";
  return { title: `${metric.name}${metric.percent ? " (%)" : ""} · ${arrow}`, format, exact: (value) => format(value), log };
}

function namesOfCurves() {
  const names = new Set();
  for (const run of state.data.runs) for (const name of Object.keys(run.curve.y)) names.add(name);
  return [...names];
}

function drawCurves() {
  toggle("log-x", "logX", drawCharts);
  toggle("log-y", "logY", drawCharts);
  drawCards("curves", state.data.metrics.map((metric) => ({
    id: `curve-${metric.name}`, title: metric.title, name: metric.name, yAxis: metricAxis(metric, state.logY),
    goals: metric.name === state.metric ? state.targets[metric.name] : [],
  })));
}

function drawDrift() {
  const found = namesOfCurves().filter((name) => name.startsWith("drift.")).map((name) => name.split("."));
  const quantities = Object.entries(state.data.quantities).filter(([name]) => found.some((each) => each[2] === name));
  choice("quantity", Object.fromEntries(quantities.map(([name, { title }]) => [name, title])), "quantity", drawDrift);
  toggle("drift-log", "driftLog", drawDrift);
  byId("drift-title").parentElement.hidden = state.data.settings.length > 0 && !quantities.length && state.data.runs.some((run) => run.round);
  byId("drift-note").textContent = found.length ? NOTES[state.quantity] || "" : "";
  const levels = found.filter((each) => each[2] === state.quantity).map((each) => Number(each[1])).sort((a, b) => a - b);
  drawCards("drift", levels.map((level) => {
    const { title, note } = state.data.levels[level] || { title: `Level ${level}`, note: "" };
    const { title: what, unit } = state.data.quantities[state.quantity];
    const yAxis = { title: `${what} (${unit})`, format: short, exact: (value) => short(value), log: state.driftLog, zero: !state.driftLog && state.quantity !== "cosine" };
    return { id: `drift-${level}`, title, note: state.quantity === "drift" ? note : `level ${level}`, name: `drift.${level}.${state.quantity}`, yAxis };
  }));
}

const SUMMARIES = { mean: "mean", worst: "worst", spread: "spread" };

// Mean, worst and spread over the nodes of a level, of the metric that is chosen above.
function drawOverNodes() {
  const found = namesOfCurves().filter((name) => name.startsWith("nodes.")).map((name) => name.split("."));
  const levels = [...new Set(found.map((each) => Number(each[1])))].sort((a, b) => a - b);
  const metric = metricOf(state.metric);
  byId("over-title").parentElement.hidden = !levels.length || !metric;
  if (!levels.length || !metric) return;
  choice("over", SUMMARIES, "over", drawOverNodes);
  const part = state.over === "worst" ? (metric.better === "higher" ? "lowest" : "highest") : state.over;
  byId("over-note").textContent = { mean: "Mean over the nodes of a level, each with its own model just before its parent replaces it.",
    worst: "The node of a level that does worst in a round.", spread: "Standard deviation over the nodes of a level: how unequal they are served." }[state.over];
  const yAxis = { ...metricAxis(metric, state.logY), ...(state.over === "spread" ? { title: `spread of ${metric.name}${metric.percent ? " (percentage points)" : ""}`, zero: !state.logY } : {}) };
  drawCards("over-nodes", levels.map((level) => ({
    id: `over-${level}`, title: state.data.levels[level]?.title ?? `Level ${level}`, note: `${SUMMARIES[state.over]} ${metric.name} over the nodes of level ${level}`,
    name: `nodes.${level}.${part}.${metric.name}`, yAxis,
  })));
}

const NOTES = {
  drift: "How far the models of a level are from their siblings’ mean just before each synchronisation (root mean square).",
  correction: "Length of the corrections a level’s nodes added to their gradients (z of clients, y of groups).",
  progress: "How far a level’s models move: clients by training, aggregators by one synchronisation.",
  bias: "Distance between the corrections and the ideal ones (Z of clients, Y of groups).",
  cosine: "Cosine between the corrections and the ideal ones: 1 where they point the same way.",
  clipped: "Share of the clients’ steps that were shortened by clipping.",
  refused: "Updates refused because they were not finite, or far too large.",
  absent: "Nodes that were asked and did not answer in time.",
};
