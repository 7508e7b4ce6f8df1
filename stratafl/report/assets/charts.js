"use strict";
// Curves: metrics and drift, one chart each, all with the same colours and the same settings hidden.

// a drag on a touch screen scrolls the page, and there is no room for a row of buttons
const TOUCH = matchMedia("(pointer: coarse)").matches || matchMedia("(max-width: 640px)").matches;
// the buttons are named one by one: the library's own set has one that sends the chart to its maker's server
const CONFIG = {
  displaylogo: false,
  displayModeBar: TOUCH ? false : "hover",
  modeBarButtons: [["toImage"], ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
  plotlyServerURL: "",
  responsive: true,
  toImageButtonOptions: { format: "svg" },
};

function layout(extra) {
  const line = { gridcolor: style("--grid"), linecolor: style("--line"), zerolinecolor: style("--line"), automargin: true };
  return {
    margin: { l: 48, r: 14, t: TOUCH ? 10 : 30, b: 42 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: style("--quiet") },
    hoverlabel: { bgcolor: style("--card"), bordercolor: style("--line"), font: { color: style("--ink"), size: 12 }, namelength: 40 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: style("--quiet"), activecolor: style("--accent") },
    showlegend: false,
    dragmode: TOUCH ? false : "zoom",
    ...extra,
    xaxis: { ...line, ...extra.xaxis },
    yaxis: { ...line, ...extra.yaxis },
  };
}

function unfolded(colourText) {
  const value = parseInt(colourText.slice(1), 16);
  return `rgba(${value >> 16}, ${(value >> 8) & 255}, ${value & 255}, 0.15)`;
}

function line(curve, name, label, number, width) {
  return {
    type: "scatter",
    mode: curve.y[name].filter((value) => value !== null).length > 1 ? "lines" : "markers",
    name: plain(label),
    x: curve.x[state.axis],
    y: curve.y[name],
    connectgaps: true,
    line: { color: colour(number), width, dash: dash(number) },
    marker: { color: colour(number), size: 7 },
    visible: !state.hidden.has(label),
  };
}

function band(curve, name, label, number) {
  const edge = (sign) => ({
    type: "scatter",
    mode: "lines",
    x: curve.x[state.axis],
    y: curve.y[name].map((value, place) => (value === null ? null : value + sign * curve.spread[name][place])),
    line: { width: 0 },
    hoverinfo: "skip",
    connectgaps: true,
    visible: !state.hidden.has(label),
  });
  return [edge(-1), { ...edge(1), fill: "tonexty", fillcolor: unfolded(colour(number)) }];
}

// Everything to draw for one value: a mean with its band for each setting, or every run.
function traces(name, format) {
  const found = [];
  state.data.settings.forEach((setting, number) => {
    if (state.view === "mean") {
      const curve = setting.mean;
      if (!curve.y[name]) return;
      if (curve.spread[name]) found.push(...band(curve, name, setting.label, number));
      found.push({ ...line(curve, name, setting.label, number, 2.4), yhoverformat: format });
    } else {
      for (const run of setting.runs) {
        if (!run.curve.y[name]) continue;
        const own = setting.runs.length > 1 ? `${setting.label}, seed ${run.seed}` : setting.label;
        found.push({ ...line(run.curve, name, setting.label, number, 1.6), name: plain(own), yhoverformat: format });
      }
    }
  });
  return found;
}

function draw(host, id, title, note, name, yaxis, format) {
  let figure = document.getElementById(id);
  if (!figure) {
    figure = element("figure", { id, className: "card" }, element("figcaption"), element("div", { className: "plot" }));
    host.append(figure);
  }
  figure.firstChild.replaceChildren(title, ...(note ? [element("small", { textContent: note })] : []));
  const goal = name === "accuracy" ? state.data.targets : [];
  Plotly.react(figure.lastChild, traces(name, format), layout({
    // zoom is kept while new rounds come in, and given up when another axis is chosen
    uirevision: `${state.axis} ${state.scale} ${name}`,
    hovermode: "x unified",
    xaxis: { title: { text: state.data.axes[state.axis], standoff: 8 }, rangemode: "tozero", hoverformat: ",.4~s",
      ...(state.axis === "rounds" ? { hoverformat: "d" } : {}) },
    yaxis,
    shapes: goal.map((target) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: target, y1: target,
      line: { color: style("--quiet"), width: 1, dash: "dot" } })),
  }), CONFIG);
  return figure;
}

// Charts that no longer have anything to show go away.
function keep(host, figures) {
  for (const old of [...host.children]) {
    if (figures.includes(old)) continue;
    if (old.lastChild && old.lastChild.data) Plotly.purge(old.lastChild);
    old.remove();
  }
  if (!figures.length) host.append(element("p", { className: "quiet", textContent: "Nothing was recorded yet." }));
}

function metricNames() {
  const names = new Set();
  for (const setting of state.data.settings) {
    for (const run of setting.runs) Object.keys(run.curve.y).forEach((name) => names.add(name));
  }
  return [...names];
}

function drawCurves() {
  const host = document.getElementById("curves");
  const names = metricNames().filter((name) => !name.startsWith("drift."));
  names.sort((a, b) => (a === "accuracy" ? -1 : b === "accuracy" ? 1 : a < b ? -1 : 1));
  keep(host, names.map((name) => {
    const share = name === "accuracy";
    const title = share ? "Test accuracy" : name === "loss" ? "Test loss" : name;
    return draw(host, `curve-${name}`, title, "", name, share ? { tickformat: ".0%" } : {}, share ? ".2%" : ".4~g");
  }));
}

function drawDrift() {
  const host = document.getElementById("drift");
  const found = metricNames().filter((name) => name.startsWith("drift.")).map((name) => name.split("."));
  const quantities = Object.entries(state.data.quantities).filter(([name]) => found.some((each) => each[2] === name));
  choice("quantity", Object.fromEntries(quantities), "quantity", drawDrift);
  choice("scale", found.length ? { linear: "linear", log: "log" } : {}, "scale", drawDrift);
  document.getElementById("drift-note").textContent = found.length ? NOTES[state.quantity] || "" : "";
  const levels = found.filter((each) => each[2] === state.quantity).map((each) => Number(each[1])).sort((a, b) => a - b);
  keep(host, levels.map((level) => {
    const { title, note } = state.data.levels[level] || { title: `Level ${level}`, note: "" };
    const told = state.quantity === "drift" ? note : `level ${level}`;
    const axis = { type: state.scale, ...(state.scale === "linear" && state.quantity !== "cosine" ? { rangemode: "tozero" } : {}) };
    return draw(host, `drift-${level}`, title, told, `drift.${level}.${state.quantity}`, axis, ".4~g");
  }));
}

const NOTES = {
  drift: "How far the models of a level are from their siblings’ mean just before each synchronisation (root mean square).",
  correction: "Length of the corrections a level’s nodes added to their gradients (z of clients, y of groups).",
  progress: "How far a level’s models move: clients by training, aggregators by one synchronisation.",
  bias: "Distance between the corrections and the ideal ones (Z of clients, Y of groups).",
  cosine: "Cosine between the corrections and the ideal ones: 1 where they point the same way.",
  clipped: "Share of the clients’ steps that were shortened by clipping.",
  refused: "Updates refused because they were not finite, or far too large.",
};
