"use strict";
// Which charts there are: a metric's, a level's drift, and what is known over the nodes of a level.

function lineOf(curve, name, label, number, width, dead) {
  const spread = curve.spread[name];
  const edge = (sign) => curve.y[name].map((value, place) => (value === null || spread[place] === null ? null : value + sign * spread[place]));
  return { label, number, width, dead, x: curve.x[state.axis], y: curve.y[name], ...(spread ? { low: edge(-1), high: edge(1) } : {}) };
}

// Everything to draw for one value: a mean with its band for each setting, or every run. What has no value on the axis is left out.
function linesOf(name) {
  const found = [];
  const isDrawn = (curve) => curve.y[name] && curve.x[state.axis].some((value) => value !== null);
  state.data.settings.forEach((setting, number) => {
    if (state.hidden.has(setting.label)) return;
    const isMetric = !name.startsWith("drift.");
    if (state.view === "mean") {
      const dead = setting.runs.some((run) => run.diverged !== null);
      if (isDrawn(setting.mean)) found.push(lineOf(setting.mean, name, setting.label, number, 2.2, dead && isMetric));
      return;
    }
    for (const run of setting.runs) {
      const label = setting.runs.length > 1 ? run.title : setting.label;
      if (isDrawn(run.curve)) found.push(lineOf(run.curve, name, label, number, 1.4, run.diverged !== null && isMetric));
    }
  });
  return found;
}

function xAxis() {
  const axis = state.data.axes[state.axis];
  const isRounds = axis.unit === "rounds";
  return { title: axis.title, format: AXIS_FORMATS[axis.unit], told: (value) => axisText(axis, value), log: state.logX, zero: !state.logX && !isRounds, whole: isRounds };
}

// Which settings cannot be drawn against the chosen axis, and why.
function axisNote() {
  const isCounted = ({ mean }, name) => mean.x[name].some((value) => value !== null);
  const byLevel = Object.keys(state.data.axes).filter((name) => name.startsWith("traffic."));
  const started = state.data.settings.filter(({ mean }) => mean.x.rounds.length);
  const lacking = started.filter((setting) => !isCounted(setting, state.axis));
  const named = (settings) => settings.map(({ label }) => label).join("; ");
  const reason = "deployed trees and runs of earlier versions do not count the bytes of each level";
  if (!byLevel.length) return started.length ? `There is no axis of bytes on the top link: ${reason}.` : "";
  if (!lacking.length) return "";
  const uncounted = lacking.filter((setting) => !byLevel.some((name) => isCounted(setting, name)));
  if (!byLevel.includes(state.axis)) return `Not known on this axis: ${named(lacking)}.`;
  const flat = lacking.filter((setting) => !uncounted.includes(setting));
  return [uncounted.length ? `Not drawn: ${named(uncounted)}; ${reason}.` : "", flat.length ? `No such level: ${named(flat)}.` : ""].filter(Boolean).join(" ");
}

// A row's width is shared by the cards in it, so all of them stand before the first chart is measured.
function drawCards(id, cards) {
  const host = byId(id);
  const figures = cards.map((shown) => byId(shown.id) || card(shown.id));
  for (const old of [...host.children]) if (!figures.includes(old) && old.lastChild) rooms.unobserve(old.lastChild instanceof Element ? old.lastChild : old);
  // three charts stand in one row where it is wide, and four in two rows
  host.dataset.charts = figures.length;
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

function levelTitle(level) {
  return state.data.levels[level]?.title ?? `Level ${level}`;
}

function metricChart(metric) {
  return { title: metric.title, name: metric.name, yAxis: metricAxis(metric, state.logY), goals: metric.name === state.metric ? state.targets[metric.name] : [] };
}

function driftChart(level, quantity, log) {
  const { title, unit } = state.data.quantities[quantity];
  const yAxis = { title: `${title} (${unit})`, format: short, exact: (value) => short(value), log, zero: !log && quantity !== "cosine" };
  const note = quantity === "drift" ? state.data.levels[level]?.note : `level ${level}`;
  return { title: levelTitle(level), note, name: `drift.${level}.${quantity}`, yAxis };
}

function overChart(level, part, summary, metric) {
  const spread = { title: `spread of ${metric.name}${metric.percent ? " (percentage points)" : ""}`, zero: !state.logY };
  const yAxis = { ...metricAxis(metric, state.logY), ...(part === "spread" ? spread : {}) };
  return { title: levelTitle(level), note: `${summary} ${metric.name} over the nodes of level ${level}`, name: `nodes.${level}.${part}.${metric.name}`, yAxis };
}

// Names such as drift.LEVEL.QUANTITY and nodes.LEVEL.SUMMARY.METRIC in their parts, in the order of the tree.
function partsOf(beginning) {
  return namesOfCurves().filter((name) => name.startsWith(`${beginning}.`)).map((name) => name.split("."))
    .map(([, level, part, ...rest]) => ({ level: Number(level), part, metric: rest.join(".") })).sort((a, b) => a.level - b.level);
}

// Every value that was recorded, as a chart: the metrics, what drifts on each level, and what is known over its nodes.
function recordedCharts() {
  const quantities = Object.keys(state.data.quantities);
  const drift = partsOf("drift").filter(({ part }) => quantities.includes(part)).sort((a, b) => quantities.indexOf(a.part) - quantities.indexOf(b.part));
  const over = partsOf("nodes").filter(({ metric }) => metricOf(metric));
  const named = (chart, text) => ({ ...chart, text, title: text });
  return [
    ...state.data.metrics.map((metric) => named(metricChart(metric), metric.title)),
    ...drift.map(({ level, part }) => named(driftChart(level, part, state.logY), `${state.data.quantities[part].title}: ${levelTitle(level)}`)),
    ...over.map(({ level, part, metric }) => named(overChart(level, part, part, metricOf(metric)), `${part} ${metric} of nodes: ${levelTitle(level)}`)),
  ];
}

function drawCurves() {
  toggle("log-x", "logX", drawCharts);
  toggle("log-y", "logY", drawCharts);
  const charts = recordedCharts();
  choose("shown", { metrics: "every metric", ...Object.fromEntries(charts.map(({ name, text }) => [name, text])) }, "shown", drawCurves);
  const shown = state.shown === "metrics" ? state.data.metrics.map(metricChart) : charts.filter(({ name }) => name === state.shown);
  byId("curves-note").textContent = axisNote();
  drawCards("curves", shown.map((chart) => ({ ...chart, id: `curve-${chart.name}` })));
}

function drawDrift() {
  const found = partsOf("drift");
  const quantities = Object.entries(state.data.quantities).filter(([name]) => found.some(({ part }) => part === name));
  choice("quantity", Object.fromEntries(quantities.map(([name, { title }]) => [name, title])), "quantity", drawDrift);
  toggle("drift-log", "driftLog", drawDrift);
  byId("drift-title").parentElement.hidden = state.data.settings.length > 0 && !quantities.length && state.data.runs.some((run) => run.round);
  byId("drift-note").textContent = found.length ? NOTES[state.quantity] || "" : "";
  const levels = found.filter(({ part }) => part === state.quantity).map(({ level }) => level);
  drawCards("drift", levels.map((level) => ({ ...driftChart(level, state.quantity, state.driftLog), id: `drift-${level}` })));
}

const SUMMARIES = { mean: "mean", worst: "worst", spread: "spread" };

// Mean, worst and spread over the nodes of a level, of the metric that is chosen above.
function drawOverNodes() {
  const levels = [...new Set(partsOf("nodes").map(({ level }) => level))];
  const metric = metricOf(state.metric);
  byId("over-title").parentElement.hidden = !levels.length || !metric;
  if (!levels.length || !metric) return;
  choice("over", SUMMARIES, "over", drawOverNodes);
  const part = state.over === "worst" ? (metric.better === "higher" ? "lowest" : "highest") : state.over;
  byId("over-note").textContent = { mean: "Mean over the nodes of a level, each with its own model just before its parent replaces it.",
    worst: "The node of a level that does worst in a round.", spread: "Standard deviation over the nodes of a level: how unequal they are served." }[state.over];
  drawCards("over-nodes", levels.map((level) => ({ ...overChart(level, part, SUMMARIES[state.over], metric), id: `over-${level}` })));
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
