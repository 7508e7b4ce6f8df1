"use strict";
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
