"use strict";
// A chart of lines with their bands: drawn as SVG, hovered over, zoomed into, and saved as a file.

// Numbers on an axis: where they lie, which of them are written, and how.
const MINUS = "−";

// A number with as many digits as asked for, halves to the even one, as the tables of the command line have it.
function fixed(value, digits) {
  const twice = value * 10 ** digits * 2;
  const isTie = Number.isInteger(value * 2 ** (digits + 1)) && Math.abs(twice % 2) === 1;
  const shown = isTie ? ((2 * Math.round(twice / 4)) / 10 ** digits).toFixed(digits) : value.toFixed(digits);
  return shown.replace("-", MINUS);
}

function written(value, digits) {
  if (digits !== null) return fixed(value, digits);
  return value.toExponential(2).replace("e+", "e").replaceAll("-", MINUS);
}

// At most so many significant digits, and no zeros that say nothing.
function short(value, digits = 4) {
  const size = Math.abs(value);
  if (value !== 0 && (size >= 1e6 || size < 1e-4)) return value.toExponential(Math.max(0, Math.min(2, digits - 1))).replace(/\.?0+e/, "e").replace("e+", "e").replaceAll("-", MINUS);
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 10 }).replace("-", MINUS);
}

function bytesText(value, digits = 3) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  const place = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log10(value) / 3 + 1e-9));
  return `${Number((value / 1000 ** place).toPrecision(digits))} ${units[place]}`;
}

const AXIS_FORMATS = {
  rounds: (value) => short(value, 6), steps: (value) => short(value, 6), bytes: (value) => bytesText(value), seconds: (value) => `${short(value, 3)} s`, money: (value) => short(value, 3),
};

// A value of an axis as a text of its own: "round 3", "1.2 MB on the top link".
function axisText({ title, unit }, value, digits = 4) {
  if (unit === "bytes") return bytesText(value) + title.replace(/^bytes/, "");
  return { rounds: `round ${short(value, 6)}`, steps: `${short(value, 6)} local steps`, seconds: `${short(value, digits)} s`, money: short(value, digits) }[unit];
}

function axisTitles() {
  return Object.fromEntries(Object.entries(state.data.axes).map(([name, { title }]) => [name, title]));
}

function percentText(value, digits = 4) {
  return `${short(100 * value, digits)} %`;
}

function metricOf(name) {
  return state.data.metrics.find((metric) => metric.name === name);
}

// The value of a metric as a table has it, "91.2 ± 0.3": a share in per cent, without the sign.
function metricCell(metric, found) {
  if (!found) return { text: "—", mean: null, deviation: null };
  const factor = metric.percent ? 100 : 1;
  const mean = factor * found.mean;
  const deviation = found.deviation === null ? null : factor * found.deviation;
  return { mean, deviation, text: written(mean, metric.digits) + (deviation === null ? "" : ` ± ${written(deviation, metric.digits)}`) };
}

function goalText(metric, target) {
  return metric.percent ? `${Number((100 * target).toPrecision(6))} %` : String(Number(target.toPrecision(6)));
}

// From values to pixels. A logarithmic axis shows what is above zero.
function scale([low, high], [from, to], log) {
  const warp = log ? Math.log10 : (value) => value;
  const [a, b] = [warp(low), warp(high)];
  const at = (value) => from + ((warp(value) - a) / (b - a)) * (to - from);
  const inverse = (pixel) => {
    const value = a + ((pixel - from) / (to - from)) * (b - a);
    return log ? 10 ** value : value;
  };
  return { at, inverse, domain: [low, high], log };
}

function ticks([low, high], most, log) {
  if (log) {
    const [a, b] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
    const powers = Array.from({ length: Math.max(0, b - a + 1) }, (_, place) => 10 ** (a + place));
    if (powers.length >= 3) {
      const every = Math.ceil(powers.length / most);
      return powers.filter((_, place) => place % every === 0);
    }
    const few = [];
    for (let power = a - 1; power <= b; power += 1) for (const digit of [1, 2, 5]) few.push(digit * 10 ** power);
    const inside = few.filter((value) => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9));
    if (inside.length >= 4) return inside;
  }
  const rough = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((digit) => digit * power).find((each) => each >= rough * 0.75);
  const found = [];
  for (let number = Math.ceil(low / step - 1e-9); number * step <= high + step * 1e-9; number += 1) found.push(Number((number * step).toPrecision(12)));
  return found;
}

// Each tick with its text, in as many digits as it takes to tell them apart.
function labelled(values, format) {
  for (let digits = 4; ; digits += 1) {
    const texts = values.map((value) => format(value, digits));
    if (digits === 12 || new Set(texts).size === texts.length) return values.map((value, place) => ({ value, text: texts[place] }));
  }
}

// What an axis shows: all values and a little air, or from zero.
function extent(values, { log = false, zero = false, whole = false, air = 0.04 } = {}) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value === null || (log && value <= 0)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return log ? [1, 10] : [0, 1];
  if (log) return low === high ? [low / 2, high * 2] : [low * (low / high) ** air, high * (high / low) ** air];
  if (zero) low = Math.min(0, low);
  if (low === high) return whole ? [low - 1, high + 1] : [low - (Math.abs(low) * 0.1 || 1), high + (Math.abs(high) * 0.1 || 1)];
  const room = air * (high - low);
  return [zero && low === 0 ? 0 : low - room, high + room];
}

const ruler = document.createElement("canvas").getContext("2d");

const letters = getComputedStyle(document.body).fontFamily;

function textWidth(text, size = 12) {
  const font = `${size}px ${letters}`;
  if (textWidth.font !== font) ruler.font = textWidth.font = font; // setting it is slow
  return ruler.measureText(text).width;
}

// As much of a text as there is room for.
function fitted(text, room, size = 12) {
  const kept = [...String(text)];
  if (textWidth(kept.join(""), size) <= room) return kept.join("");
  while (kept.length && textWidth(`${kept.join("")}…`, size) > room) kept.length -= Math.max(1, Math.floor(kept.length / 20));
  return kept.length ? `${kept.join("")}…` : "";
}

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
