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
  toImageButtonOptions: { format: "svg" },
};

// Charts follow the room they have, whatever changes it: the window, a scroll bar, another chart in the row.
const rooms = new ResizeObserver((changes) => {
  for (const { target } of changes) {
    const { width, height } = room(target);
    if (!target.layout || !width || (target.layout.width === width && target.layout.height === height)) continue;
    if (target.id === "tree") drawTree(); // other names fit now
    else Plotly.relayout(target, { width, height });
  }
});

// The library measures a chart once and then keeps its size, so it is told each time.
function room(plot) {
  return { width: plot.clientWidth, height: plot.clientHeight };
}

function layout(plot, extra) {
  const line = { gridcolor: style("--grid"), linecolor: style("--line"), zerolinecolor: style("--line"), automargin: true };
  return {
    ...room(plot),
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

// A row's width is shared by the cards in it, so all of them stand before the first chart is measured.
function drawCards(host, cards) {
  const figures = cards.map(({ id }) => document.getElementById(id) || card(id));
  for (const old of [...host.children]) if (!figures.includes(old)) discard(old);
  const wanted = figures.length ? figures : [element("p", { className: "quiet", textContent: "Nothing was recorded yet." })];
  // a chart that stays where it is keeps what the pointer is doing in it
  const same = wanted.length === host.children.length && wanted.every((each, place) => host.children[place] === each);
  if (!same) host.replaceChildren(...wanted);
  cards.forEach((shown, number) => draw(figures[number], shown));
}

function card(id) {
  const plot = element("div", { className: "plot" });
  rooms.observe(plot);
  return element("figure", { id, className: "card" }, element("figcaption"), plot);
}

function discard(figure) {
  const plot = figure.lastChild;
  if (!plot || !plot.data) return;
  rooms.unobserve(plot);
  Plotly.purge(plot);
}

function draw(figure, { title, note, name, yaxis, format }) {
  figure.firstChild.replaceChildren(title, ...(note ? [element("small", { textContent: note })] : []));
  const goal = name === "accuracy" ? state.data.targets : [];
  Plotly.react(figure.lastChild, traces(name, format), layout(figure.lastChild, {
    // zoom is kept while new rounds come in, and given up when another axis is chosen
    uirevision: `${state.axis} ${state.scale} ${name}`,
    hovermode: "x unified",
    xaxis: { title: { text: state.data.axes[state.axis], standoff: 8 }, rangemode: "tozero", hoverformat: ",.4~s",
      ...(state.axis === "rounds" ? { hoverformat: "d" } : {}) },
    yaxis,
    shapes: goal.map((target) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: target, y1: target,
      line: { color: style("--quiet"), width: 1, dash: "dot" } })),
  }), CONFIG);
}

function metricNames() {
  const names = new Set();
  for (const setting of state.data.settings) {
    for (const run of setting.runs) Object.keys(run.curve.y).forEach((name) => names.add(name));
  }
  return [...names];
}

function drawCurves() {
  const names = metricNames().filter((name) => !name.startsWith("drift."));
  names.sort((a, b) => (a === "accuracy" ? -1 : b === "accuracy" ? 1 : a < b ? -1 : 1));
  drawCards(document.getElementById("curves"), names.map((name) => {
    const share = name === "accuracy";
    const title = share ? "Test accuracy" : name === "loss" ? "Test loss" : name;
    return { id: `curve-${name}`, title, note: "", name, yaxis: share ? { tickformat: ".0%" } : {}, format: share ? ".2%" : ".4~g" };
  }));
}

function drawDrift() {
  const found = metricNames().filter((name) => name.startsWith("drift.")).map((name) => name.split("."));
  const quantities = Object.entries(state.data.quantities).filter(([name]) => found.some((each) => each[2] === name));
  choice("quantity", Object.fromEntries(quantities), "quantity", drawDrift);
  choice("scale", found.length ? { linear: "linear", log: "log" } : {}, "scale", drawDrift);
  document.getElementById("drift-note").textContent = found.length ? NOTES[state.quantity] || "" : "";
  const levels = found.filter((each) => each[2] === state.quantity).map((each) => Number(each[1])).sort((a, b) => a - b);
  drawCards(document.getElementById("drift"), levels.map((level) => {
    const { title, note } = state.data.levels[level] || { title: `Level ${level}`, note: "" };
    const told = state.quantity === "drift" ? note : `level ${level}`;
    const yaxis = { type: state.scale, ...(state.scale === "linear" && state.quantity !== "cosine" ? { rangemode: "tozero" } : {}) };
    return { id: `drift-${level}`, title, note: told, name: `drift.${level}.${state.quantity}`, yaxis, format: ".4~g" };
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
