"use strict";
// A chart of lines with their bands: drawn as SVG, hovered over, zoomed into, and saved as a file.

const TOUCH = matchMedia("(pointer: coarse)").matches;
const TOLD = 10; // lines that a tooltip names
let clips = 0;

// Charts follow the room they have, whatever changes it: the window, a scroll bar, another chart in the row.
// On paper they are as on the screen, and shrunk.
const paper = matchMedia("print");
const rooms = new ResizeObserver((changes) => {
  if (paper.matches) return;
  for (const { target } of changes) {
    const room = target.querySelector("svg");
    if (room && target.clientWidth && Number(room.getAttribute("width")) !== target.clientWidth) target.redraw();
  }
});

// spec: lines [{label, number, x, y, low, high, width, dead}], axes {x, y} as {title, format, log, zero, whole}, goals.
function lineChart(host, spec) {
  host.chart = { spec };
  host.redraw = () => render(host);
  rooms.observe(host);
  render(host);
}

function render(host) {
  const { spec } = host.chart;
  const [width, height] = [host.clientWidth, host.clientHeight];
  const { x: xAxis, y: yAxis } = spec.axes;
  const shown = spec.lines.filter((line) => line.y.some((value) => value !== null));
  const zoom = state.zoom[spec.id]?.key === spec.zoomKey ? state.zoom[spec.id].range : null;
  const xs = zoom ?? extent(shown.flatMap((line) => [line.x[0], ...line.x.slice(-1), ...(xAxis.log ? line.x : [])]), { ...xAxis, air: xAxis.log ? 0.02 : 0 });
  const inside = (line) => line.y.map((value, place) => (line.x[place] !== null && line.x[place] >= xs[0] && line.x[place] <= xs[1] ? value : null));
  const ys = extent(shown.flatMap(inside).concat(zoom ? [] : edges(shown, yAxis.log), zoom ? [] : reachedGoals(shown, spec.goals)), yAxis);
  const yTicks = labelled(ticks(ys, Math.max(2, Math.floor(height / 46)), yAxis.log), yAxis.format);
  const left = Math.min(width / 3, 12 + Math.max(20, ...yTicks.map(({ text }) => textWidth(text))));
  const box = { left, right: width - 16, top: 28, bottom: height - 44 };
  const across = scale(xs, [box.left, box.right], xAxis.log);
  const up = scale(ys, [box.bottom, box.top], yAxis.log);
  const clip = `clip-${(clips += 1)}`;
  const picture = svg("svg", { class: "chart", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spec.title },
    svg("clipPath", { id: clip }, svg("rect", { x: box.left, y: box.top - 4, width: Math.max(0, box.right - box.left + 5), height: box.bottom - box.top + 8 })),
    ...grid(box, across, up, xAxis, yAxis, yTicks, width));
  for (const goal of spec.goals) {
    const y = up.at(goal);
    if (y >= box.top && y <= box.bottom) picture.append(svg("line", { class: "goal", x1: box.left, x2: box.right, y1: y, y2: y, stroke: "var(--quiet)", "stroke-width": 1, "stroke-dasharray": "2 3" }));
  }
  const lines = svg("g", { class: "lines", "clip-path": `url(#${clip})` });
  for (const line of shown) if (line.low) lines.append(band(line, across, up, box));
  for (const line of shown) lines.append(...stroke(line, across, up, box));
  const rule = svg("g", { class: "rule", visibility: "hidden" });
  picture.append(lines, rule);
  Object.assign(host.chart, { x: across, y: up, box, rule, lines: shown });
  host.replaceChildren(picture);
  listen(host, picture);
}

// How far bands reach, where they lie in what can be drawn.
function edges(lines, log) {
  return lines.flatMap((line) => (line.low ? [...line.low, ...line.high] : [])).filter((value) => value !== null && (!log || value > 0));
}

// A target that nobody came near would press all curves into a corner.
function reachedGoals(lines, goals) {
  const values = lines.flatMap((line) => line.y).filter((value) => value !== null);
  if (!values.length) return [];
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return goals.filter((goal) => goal <= high + 0.3 * (high - low) && goal >= low - 0.3 * (high - low));
}

function grid(box, across, up, xAxis, yAxis, yTicks, width) {
  const made = [];
  const label = (attributes, text) => svg("text", { "font-size": 12, fill: "var(--quiet)", ...attributes }, text);
  for (const { value, text } of yTicks) {
    const y = up.at(value);
    made.push(svg("line", { x1: box.left, x2: box.right, y1: y, y2: y, stroke: "var(--grid)", "stroke-width": 1 }),
      label({ class: "ytick", x: box.left - 8, y: y + 4, "text-anchor": "end" }, fitted(text, box.left - 8)));
  }
  let end = -Infinity;
  const widest = Math.max(36, textWidth(xAxis.format(across.domain[1])) + 18);
  for (const value of ticks(across.domain, Math.max(2, Math.floor((box.right - box.left) / widest)), xAxis.log)) {
    if (xAxis.whole && !Number.isInteger(value)) continue;
    const text = xAxis.format(value);
    const half = textWidth(text) / 2;
    const x = Math.min(across.at(value), width - half - 1);
    if (x - half < end + 8) continue;
    end = x + half;
    made.push(svg("line", { x1: across.at(value), x2: across.at(value), y1: box.bottom, y2: box.bottom + 4, stroke: "var(--line)" }),
      label({ class: "xtick", x, y: box.bottom + 17, "text-anchor": "middle" }, text));
  }
  made.push(svg("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, stroke: "var(--axis)" }),
    label({ class: "xtitle", x: (box.left + box.right) / 2, y: box.bottom + 36, "text-anchor": "middle" }, fitted(xAxis.title, box.right - box.left)),
    label({ class: "ytitle", x: 10, y: 14 }, fitted(yAxis.title, width - 20)));
  return made;
}

// The points to draw: those in view and a neighbour on each side, and at most the extremes of each pixel.
function points(line, values, across, up, box) {
  const found = [];
  let before = null;
  let isOut = false;
  for (let place = 0; place < values.length; place += 1) {
    if (values[place] === null || line.x[place] === null || (across.log && line.x[place] <= 0) || (up.log && values[place] <= 0)) continue;
    const point = [across.at(line.x[place]), up.at(values[place])];
    if (point[0] < box.left - 1) before = point;
    else if (!isOut) {
      if (before) found.push(before);
      before = null;
      found.push(point);
      isOut = point[0] > box.right + 1;
    }
  }
  if (found.length <= 2 * (box.right - box.left)) return found;
  const columns = new Map();
  for (const point of found) {
    const column = columns.get(Math.round(point[0]));
    if (!column) columns.set(Math.round(point[0]), [point, point]);
    else if (point[1] < column[0][1]) column[0] = point;
    else if (point[1] > column[1][1]) column[1] = point;
  }
  return [...columns.values()].flatMap(([low, high]) => (low === high ? [low] : low[0] <= high[0] ? [low, high] : [high, low]));
}

const joined = (found) => found.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L");

function stroke(line, across, up, box) {
  const found = points(line, line.y, across, up, box);
  const attributes = { class: "line", stroke: colour(line.number), "stroke-width": line.width, "stroke-dasharray": dash(line.number), fill: "none", "stroke-linejoin": "round" };
  if (!found.length) return [];
  const [x, y] = found[found.length - 1];
  const made = found.length === 1 ? [svg("circle", { class: "line", cx: x, cy: y, r: 3.5, fill: colour(line.number) })] : [svg("path", { ...attributes, d: `M${joined(found)}` })];
  // a run that died ends in a cross
  if (line.dead) made.push(svg("path", { class: "dead", d: `M${x - 4},${y - 4}l8,8m-8,0l8,-8`, stroke: colour(line.number), "stroke-width": 2, fill: "none" }));
  return made;
}

function band(line, across, up, box) {
  const floor = up.log ? up.domain[0] / 10 : -Infinity;
  const low = points(line, line.low.map((value) => (value === null ? null : Math.max(value, floor))), across, up, box);
  const high = points(line, line.high, across, up, box);
  return svg("path", { class: "band", d: `M${joined(high)}L${joined(low.reverse())}Z`, fill: colour(line.number), "fill-opacity": 0.13 });
}

function nearest(line, value) {
  let found = -1;
  for (let place = 0; place < line.x.length; place += 1) {
    if (line.y[place] === null || line.x[place] === null) continue;
    if (found < 0 || Math.abs(line.x[place] - value) < Math.abs(line.x[found] - value)) found = place;
    else if (line.x[place] > value) break;
  }
  return found;
}

// What the lines are at some place, beside a rule: the nearest to the pointer, in the order in which they lie.
function hover(host, value, y = null) {
  const { spec, x: across, y: up, box, rule, lines } = host.chart;
  const anchor = lines.map((line) => nearest(line, value)).map((place, number) => (place < 0 ? null : lines[number].x[place])).filter((each) => each !== null)
    .sort((a, b) => Math.abs(a - value) - Math.abs(b - value))[0];
  if (anchor === undefined) return leave(host);
  const reach = (box.right - box.left) / 20;
  let found = lines.map((line) => ({ line, place: nearest(line, anchor) }))
    .filter(({ line, place }) => place >= 0 && Math.abs(across.at(line.x[place]) - across.at(anchor)) <= reach)
    .map(({ line, place }) => ({ line, x: line.x[place], value: line.y[place], spread: line.high ? line.high[place] - line.y[place] : null }));
  const more = found.length - TOLD;
  if (more > 0 && y !== null) found.sort((a, b) => Math.abs(up.at(a.value) - y) - Math.abs(up.at(b.value) - y));
  found = found.slice(0, TOLD).sort((a, b) => b.value - a.value);
  const at = across.at(anchor);
  rule.replaceChildren(svg("line", { x1: at, x2: at, y1: box.top, y2: box.bottom, stroke: "var(--axis)" }),
    ...found.filter(({ value: each }) => !up.log || each > 0).map(({ line, x, value: each }) => svg("circle", { cx: across.at(x), cy: up.at(each), r: 3.5, fill: colour(line.number), stroke: "var(--card)", "stroke-width": 1.5 })));
  rule.setAttribute("visibility", "visible");
  const rows = found.map(({ line, value: each, spread }) => element("div", { className: "told" }, swatch(line.number), element("span", { textContent: line.label }),
    element("b", { textContent: spec.axes.y.exact(each) + (spread ? ` ± ${spec.axes.y.exact(spread)}` : "") })));
  const rest = more > 0 ? [element("div", { className: "quiet", textContent: `and ${more} more` })] : [];
  tell(host, host.getBoundingClientRect().left + at, host.getBoundingClientRect().top + 24, element("div", { className: "head", textContent: spec.axes.x.told(anchor) }), ...rows, ...rest);
}

function leave(host) {
  host.chart?.rule?.setAttribute("visibility", "hidden");
  byId("tip").hidden = true;
}

// A tooltip beside a place in the window, on the side that has room for it.
function tell(host, x, y, ...children) {
  const tip = byId("tip");
  tip.replaceChildren(...children);
  tip.hidden = false;
  const [width, height] = [tip.offsetWidth, tip.offsetHeight];
  const room = document.documentElement.clientWidth;
  const left = x + 14 + width <= room - 4 ? x + 14 : x - 14 - width >= 4 ? x - 14 - width : Math.max(4, (room - width) / 2);
  tip.style.left = `${left}px`;
  tip.style.top = `${Math.max(4, Math.min(y, window.innerHeight - height - 4))}px`;
}

function listen(host, picture) {
  const { box } = host.chart;
  const place = (event) => event.clientX - host.getBoundingClientRect().left;
  const within = (pixel) => Math.max(box.left, Math.min(box.right, pixel));
  let start = null;
  const drawn = svg("rect", { class: "drag", y: box.top, height: Math.max(0, box.bottom - box.top), fill: "var(--accent)", "fill-opacity": 0.12, visibility: "hidden" });
  picture.append(drawn);
  picture.addEventListener("pointermove", (event) => {
    const at = within(place(event));
    if (start !== null) {
      drawn.setAttribute("x", Math.min(start, at));
      drawn.setAttribute("width", Math.abs(at - start));
      drawn.setAttribute("visibility", "visible");
    }
    hover(host, host.chart.x.inverse(at), event.clientY - host.getBoundingClientRect().top);
  });
  picture.addEventListener("pointerleave", () => leave(host));
  picture.addEventListener("pointerdown", (event) => {
    // a drag on a touch screen scrolls the page
    if (event.pointerType === "mouse" && event.button === 0) {
      start = within(place(event));
      picture.setPointerCapture(event.pointerId);
      event.preventDefault();
    }
  });
  picture.addEventListener("pointerup", (event) => {
    const from = start;
    start = null;
    drawn.setAttribute("visibility", "hidden");
    if (from === null) return;
    const at = within(place(event));
    if (Math.abs(at - from) > 8) zoomTo(host, [from, at].sort((a, b) => a - b).map(host.chart.x.inverse));
  });
  picture.addEventListener("dblclick", () => zoomTo(host, null));
}

function zoomTo(host, range) {
  const { id, zoomKey } = host.chart.spec;
  state.zoom[id] = range && { key: zoomKey, range };
  leave(host);
  render(host);
}

// A chart as a file that stands alone: its colours are those of the page now.
function saveChart(figure) {
  const copy = figure.querySelector("svg.chart").cloneNode(true);
  copy.querySelectorAll(".rule, .drag").forEach((each) => each.remove());
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("font-family", "system-ui, sans-serif");
  copy.style.background = style("--card");
  const text = new XMLSerializer().serializeToString(copy).replace(/var\((--[a-z0-9]+)\)/g, (_, name) => style(name));
  download(`${figure.id}.svg`, text, "image/svg+xml");
}

function download(name, text, kind) {
  const address = URL.createObjectURL(new Blob([text], { type: kind }));
  const link = element("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
