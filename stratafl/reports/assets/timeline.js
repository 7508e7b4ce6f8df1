"use strict";
// One global round of a run on a network: a row per node below its parent, and on it what the node does, and when.

const LINE = 20; // a row's height
// how each part reads, and which share of a row its bars are high: in grey, too, waiting is not working
const WORK = {
  down: { word: "gets", high: 0.7 }, compute: { word: "computes", high: 0.7 }, up: { word: "sends", high: 0.7 }, merge: { word: "merges", high: 0.7 },
  wait: { word: "waits", high: 0.26 }, away: { word: "is away", high: 0.26 },
};
const UNITS = [["days", 86400], ["h", 3600], ["min", 60], ["s", 1]];

function secondsText(value) {
  const [name, factor] = UNITS.find(([, each]) => value >= 2 * each) ?? UNITS[3];
  return `${short(value, 4)} s${factor > 1 ? ` (${short(value / factor, 3)} ${name})` : ""}`;
}

function drawTimeline() {
  const all = state.data.timelines;
  byId("line-title").parentElement.hidden = !all.length;
  if (!all.length) return;
  const named = (rounds, key, word = "") => Object.fromEntries(rounds.map((each) => [String(each[key]), `${word}${each[key]}`]));
  const labels = Object.keys(named(all, "run"));
  if (!labels.includes(state.lineRun)) state.lineRun = labels[0];
  options("line-run", labels.map((label) => [label, label]), state.lineRun);
  const ofRun = all.filter((each) => each.run === state.lineRun);
  choice("line-network", named(ofRun, "network"), "lineNetwork", drawTimeline);
  const rounds = ofRun.filter((each) => each.network === state.lineNetwork);
  choice("line-round", named(rounds, "round", "round "), "lineRound", drawTimeline);
  const round = rounds.find((each) => String(each.round) === state.lineRound);
  const host = byId("timeline");
  host.view = { round, rows: round.rows.map(rowOf), at: null };
  host.style.height = `${8 + LINE * round.rows.length + 48}px`;
  host.redraw = () => renderTimeline(host);
  rooms.observe(host);
  renderTimeline(host);
  drawWork(host.view.rows);
  byId("line-note").textContent = timelineNote(round);
  if (byId("line-rows").open) drawLineTable();
}

// A row with its bars in order, and how long each part of it is in all.
function rowOf(row) {
  const bars = Object.entries(row.bars).flatMap(([what, times]) => Array.from({ length: times.length / 2 }, (_, n) => ({ what, begin: times[2 * n], seconds: times[2 * n + 1] })));
  const sums = Object.fromEntries(Object.keys(WORK).map((what) => [what, bars.reduce((sum, bar) => sum + (bar.what === what ? bar.seconds : 0), 0)]));
  return { ...row, bars: bars.sort((a, b) => a.begin - b.begin), sums };
}

function timelineNote({ run, network, round, rounds, seconds, nodes, rows }) {
  const roles = [...new Set(rows.map(({ role }) => role).filter(Boolean))];
  const some = rows.length < nodes ? ` ${rows.length} of the ${nodes.toLocaleString("en")} nodes that take part are shown: of large groups the ${roles.join(", ").replace(/, (?=\w+$)/, " and ")} child.` : "";
  return `Round ${round} of ${rounds} of ${run} takes ${secondsText(seconds)} on ${network}. The root is on top, and each node stands below its parent; where a parent has no bar, its children are at work.${some}`;
}

function renderTimeline(host) {
  const { round, rows } = host.view;
  const [width, height] = [host.clientWidth, host.clientHeight];
  const room = width * 0.36;
  const labels = rows.map(({ name, level, role }) => fitted([name, role].filter(Boolean).join(" · "), room - 10 * level - 16));
  const left = Math.min(room, 24 + Math.max(...labels.map((label, place) => 10 * rows[place].level + textWidth(label))));
  const box = { left, right: width - 18, top: 8, bottom: 8 + LINE * rows.length };
  const [unit, factor] = UNITS.find(([, each]) => round.seconds >= 2 * each) ?? UNITS[3];
  const across = scale([0, round.seconds || 1], [box.left, box.right], false);
  const picture = svg("svg", { class: "chart", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Time line of round ${round.round}` });
  rows.forEach((row, place) => {
    const y = box.top + LINE * place;
    const inner = place + 1 < rows.length && rows[place + 1].level > row.level;
    picture.append(svg("text", { x: 10 + 10 * row.level, y: y + LINE / 2 + 4, "font-size": 12, "font-weight": inner || !place ? 600 : 400, fill: inner || !place ? "var(--ink)" : "var(--quiet)" }, labels[place]),
      svg("line", { x1: box.left, x2: box.right, y1: y + LINE, y2: y + LINE, stroke: "var(--grid)" }), ...barsOf(row, y, across));
  });
  picture.append(...timeAxis(box, across, unit, factor, width));
  const rule = svg("rect", { class: "rule", fill: "none", stroke: "var(--ink)", "stroke-width": 1.5, rx: 2, visibility: "hidden" });
  picture.append(rule);
  Object.assign(host, { box, across, rule });
  host.replaceChildren(picture);
  picture.addEventListener("pointermove", (event) => lineHover(host, event));
  picture.addEventListener("pointerdown", (event) => lineHover(host, event));
  picture.addEventListener("pointerleave", () => lineLeave(host));
}

// One path for all bars of a kind: a row may have hundreds.
function barsOf(row, y, across) {
  return Object.entries(WORK).filter(([what]) => row.sums[what] > 0).map(([what, { high }]) => {
    const tall = LINE * high;
    const pieces = row.bars.filter((bar) => bar.what === what).map(({ begin, seconds }) => {
      const from = across.at(begin);
      const wide = Math.max(0.6, across.at(begin + seconds) - from);
      return `M${from.toFixed(1)},${(y + (LINE - tall) / 2).toFixed(1)}h${wide.toFixed(1)}v${tall.toFixed(1)}h${(-wide).toFixed(1)}Z`;
    });
    return svg("path", { class: `work ${what}`, d: pieces.join(""), fill: `var(--${what})` });
  });
}

function timeAxis(box, across, unit, factor, width) {
  const label = (attributes, text) => svg("text", { "font-size": 12, fill: "var(--quiet)", "text-anchor": "middle", ...attributes }, text);
  const made = [svg("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, stroke: "var(--axis)" })];
  let end = -Infinity;
  for (const value of ticks([0, across.domain[1] / factor], Math.max(2, Math.floor((box.right - box.left) / 50)), false)) {
    const text = short(value, 4);
    const half = textWidth(text) / 2;
    const x = Math.min(across.at(value * factor), width - half - 1);
    if (x - half < end + 8) continue;
    end = x + half;
    made.push(svg("line", { x1: across.at(value * factor), x2: across.at(value * factor), y1: box.bottom, y2: box.bottom + 4, stroke: "var(--line)" }), label({ class: "xtick", x, y: box.bottom + 17 }, text));
  }
  return [...made, label({ class: "xtitle", x: (box.left + box.right) / 2, y: box.bottom + 36 }, { s: "seconds", min: "minutes", h: "hours", days: "days" }[unit])];
}

function workSwatch(what) {
  const tall = 12 * WORK[what].high;
  return svg("svg", { class: "swatch", width: 18, height: 12, viewBox: "0 0 18 12", "aria-hidden": "true" }, svg("rect", { x: 0, width: 18, y: 6 - tall / 2, height: tall, fill: `var(--${what})` }));
}

// What the colours mean, of those that there are.
function drawWork(rows) {
  const there = Object.keys(WORK).filter((what) => rows.some(({ sums }) => sums[what] > 0));
  fill("line-key", ...there.map((what) => element("span", {}, workSwatch(what), ` ${WORK[what].word}`)));
}

// A bar of a row, or the row alone, beside which it is told what the node does there and in all.
function tellBar(host, place, number, x, y) {
  const row = host.view.rows[place];
  const bar = row.bars[number];
  const line = (what, seconds) => element("div", { className: "told" }, workSwatch(what), element("span", { textContent: WORK[what].word }), element("b", { textContent: secondsText(seconds) }));
  const role = row.role ? `the ${row.role} of ${row.siblings} siblings` : "";
  const sums = Object.keys(WORK).filter((what) => row.sums[what] > 0).map((what) => `${WORK[what].word} ${secondsText(row.sums[what])}`);
  tell(host, x, y, element("div", { className: "head", textContent: [row.name, role].filter(Boolean).join(", ") }), ...(bar ? [line(bar.what, bar.seconds),
    element("div", { className: "quiet", textContent: `from ${short(bar.begin, 5)} s to ${short(bar.begin + bar.seconds, 5)} s` })] : []),
    element("div", { className: "quiet", textContent: `In this round: ${sums.join(", ") || "nothing"}.` }));
  const [from, to] = bar ? [bar.begin, bar.begin + bar.seconds].map(host.across.at) : [host.box.left, host.box.right];
  for (const [name, value] of Object.entries({ x: from, width: Math.max(1, to - from), y: host.box.top + LINE * place + 2, height: LINE - 4, visibility: "visible" })) host.rule.setAttribute(name, value);
  host.view.at = [place, number];
}

function lineLeave(host) {
  host.rule.setAttribute("visibility", "hidden");
  byId("tip").hidden = true;
}

function lineHover(host, event) {
  const frame = host.getBoundingClientRect();
  const place = Math.floor((event.clientY - frame.top - host.box.top) / LINE);
  if (place < 0 || place >= host.view.rows.length) return lineLeave(host);
  const x = event.clientX - frame.left;
  const at = host.across.inverse(x);
  const slack = host.across.inverse(x + 1) - at; // of bars that are thinner than a pointer
  const number = host.view.rows[place].bars.findIndex(({ begin, seconds }) => at >= begin - slack && at <= begin + seconds + slack);
  tellBar(host, place, number, event.clientX, event.clientY + 10);
}

// Arrows go from bar to bar and from row to row; Escape ends it.
function lineKey(host, event) {
  const { rows, at } = host.view;
  const [place, number] = at ?? [0, -1];
  const within = (value, count) => Math.max(0, Math.min(count - 1, value));
  const moves = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1], Home: [0, -Infinity], End: [0, Infinity] };
  if (event.key === "Escape") return lineLeave(host);
  if (!moves[event.key]) return;
  event.preventDefault();
  const row = within(place + (at ? moves[event.key][0] : 0), rows.length);
  const bar = row === place ? within(number + moves[event.key][1], rows[row].bars.length) : nearestBar(rows[row], rows[place].bars[number]);
  const frame = host.getBoundingClientRect();
  const shown = rows[row].bars[bar];
  tellBar(host, row, bar, frame.left + host.across.at(shown ? shown.begin : 0), frame.top + host.box.top + LINE * (row + 1) + 4);
}

function nearestBar(row, bar) {
  const distance = ({ begin }) => Math.abs(begin - (bar?.begin ?? 0));
  return row.bars.reduce((best, each, place) => (best < 0 || distance(each) < distance(row.bars[best]) ? place : best), -1);
}

// The same for those who do not hover.
function drawLineTable() {
  const { rows } = byId("timeline").view;
  const text = (value) => ({ text: value, mean: null, deviation: null });
  const there = Object.keys(WORK).filter((what) => rows.some(({ sums }) => sums[what] > 0));
  const columns = [
    { title: "node", better: "", cells: rows.map(({ name }) => text(name)) },
    { title: "level", better: "", cells: rows.map(({ level }) => ({ text: String(level), mean: level, deviation: null })) },
    ...there.map((what) => ({ title: `${WORK[what].word}, s`, better: "", cells: rows.map(({ sums }) => ({ text: short(sums[what], 4), mean: sums[what], deviation: null })) })),
  ];
  if (rows.some(({ role }) => role)) columns.push({ title: "of its group", better: "", cells: rows.map(({ role, siblings }) => text(role ? `${role} of ${siblings}` : "—")) });
  fill("line-table", sortedTable(columns, { key: "lineSort", first: { host: "line-table", lead: () => [] }, redraw: drawLineTable, className: "sorted" }));
}

byId("line-run").addEventListener("change", (event) => {
  state.lineRun = event.target.value;
  drawTimeline();
});
byId("timeline").addEventListener("keydown", (event) => lineKey(byId("timeline"), event));
byId("timeline").addEventListener("blur", () => lineLeave(byId("timeline")));
byId("line-save").addEventListener("click", () => saveChart(byId("round")));
byId("line-rows").addEventListener("toggle", () => {
  if (byId("line-rows").open) drawLineTable();
});
