"use strict";
// Targets and metrics are chosen on the page, so that means, best values and first rounds are computed here as in summary.py.
// The summary: a table of columns with a cell {text, mean, deviation} per setting, sorted, exported, and as bars.

function meanOf(values) {
  const known = values.filter((value) => value !== null);
  if (!known.length || known.length < values.length) return null;
  const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
  const squares = known.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  // of a sample: seeds are a few of many
  return { mean, deviation: known.length > 1 ? Math.sqrt(squares / (known.length - 1)) : null };
}

// Where a run is first as good as the target; -1 if nowhere.
function firstAt(curve, metric, target) {
  return (curve.y[metric.name] ?? []).findIndex((value) => value !== null && (metric.better === "higher" ? value >= target : value <= target));
}

// What it took the runs of a setting to get to a target, in rounds, bytes or seconds; null where one of them did not.
function costOf(setting, metric, target, axis) {
  return meanOf(setting.runs.map(({ curve }) => {
    const at = firstAt(curve, metric, target);
    return at < 0 ? null : curve.x[axis][at];
  }));
}

function isMeasured(setting, metric) {
  return setting.runs.some(({ curve }) => metric.name in curve.y);
}

function notWithin(setting, metric, target) {
  return Math.min(...setting.runs.filter(({ curve }) => firstAt(curve, metric, target) < 0).map(({ curve }) => curve.x.rounds.length));
}

function bestOf(curve, metric) {
  let best = null;
  for (const value of curve.y[metric.name] ?? []) if (value !== null && (best === null || (metric.better === "higher" ? value > best : value < best))) best = value;
  return best;
}

// What depends on the metric and the targets that are chosen on the page.
function chosenColumns() {
  const metric = metricOf(state.metric);
  if (!metric) return [];
  const { settings } = state.data;
  const best = settings.map((setting) => metricCell(metric, meanOf(setting.runs.map(({ curve }) => bestOf(curve, metric)))));
  const columns = [{ title: `best ${metric.name}${metric.percent ? ", %" : ""}`, better: metric.better, cells: best }];
  for (const target of state.targets[metric.name]) {
    const cells = settings.map((setting) => {
      const found = costOf(setting, metric, target, "rounds");
      if (!found) return { text: isMeasured(setting, metric) ? `>${notWithin(setting, metric, target)}` : "—", mean: null, deviation: null };
      const { mean, deviation } = found;
      return { ...found, text: deviation === null ? fixed(mean, 0) : `${fixed(mean, 1)} ± ${fixed(deviation, 1)}` };
    });
    columns.push({ title: `rounds to ${goalText(metric, target)}`, better: "lower", cells });
  }
  return columns;
}

function allColumns() {
  const { before, after } = state.data.summary;
  return [...before, ...chosenColumns(), ...after];
}

const valueText = (cell) => cell.text.split(" ±")[0];

// Which settings are best in a column: also those that read the same; nobody where all are alike.
function bestIn({ better, cells }) {
  const known = cells.filter((cell) => cell.mean !== null);
  if (!better || cells.length < 2 || !known.length) return new Set();
  const top = known.reduce((best, cell) => ((better === "higher" ? cell.mean > best.mean : cell.mean < best.mean) ? cell : best));
  const found = cells.map((cell, place) => (cell.mean !== null && valueText(cell) === valueText(top) ? place : -1)).filter((place) => place >= 0);
  return new Set(found.length < cells.length ? found : []);
}

// A table whose heads are buttons: the best first, then the other way round, then as it came.
function sortedTable(columns, { key, first, className = "", redraw, most = Infinity }) {
  const chosen = state[key] && columns.find((column) => column.title === state[key].title);
  const count = columns[0].cells.length;
  const order = Array.from({ length: count }, (_, place) => place);
  if (chosen) {
    const sign = state[key].down ? -1 : 1;
    const value = (place) => chosen.cells[place].mean ?? null;
    const isText = chosen.cells.every((cell) => cell.mean === null || cell.mean === undefined);
    order.sort((a, b) => {
      if (isText) return sign * chosen.cells[a].text.localeCompare(chosen.cells[b].text, "en", { numeric: true });
      // what has no number is last either way
      if (value(a) === null || value(b) === null) return (value(a) === null) - (value(b) === null);
      return sign * (value(a) - value(b));
    });
  }
  const marked = columns.map(bestIn);
  const areWords = columns.map(({ cells }) => cells.every(({ text, mean }) => text === "—" || (mean ?? null) === null && !text.startsWith(">")));
  const heads = columns.map((column, place) => {
    const isChosen = column === chosen;
    const button = element("button", { type: "button", textContent: column.title });
    button.append(element("span", { className: "arrow", ariaHidden: "true", textContent: isChosen ? (state[key].down ? "▾" : "▴") : "▴" }));
    button.addEventListener("click", () => {
      const downFirst = column.better === "higher" || column.downFirst;
      if (!isChosen) state[key] = { title: column.title, down: downFirst };
      else state[key] = state[key].down === downFirst ? { title: column.title, down: !downFirst } : null;
      redraw();
      byId(first.host).querySelectorAll("th button")[place].focus();
    });
    const head = element("th", { scope: "col" }, button);
    head.classList.toggle("words", areWords[place]);
    head.setAttribute("aria-sort", isChosen ? (state[key].down ? "descending" : "ascending") : "none");
    return head;
  });
  const rows = order.slice(0, most).map((place) => element("tr", { "data-place": place }, ...columns.map((column, number) => {
    const cell = column.cells[place];
    if (number === 0) return element("th", { scope: "row", className: cell.text.length <= 40 ? "short" : "" }, element("div", { className: "lead" }, ...first.lead(place), element("span", { textContent: cell.text })));
    const [value, spread] = cell.text.split(" ± ");
    const made = element("td", { className: marked[number].has(place) ? "best" : areWords[number] ? "words" : "" }, value);
    if (cell.text.length > 40) made.title = cell.text;
    if (spread !== undefined) made.append(element("span", { className: "spread", textContent: ` ± ${spread}` }));
    return made;
  })));
  return element("table", { className }, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows));
}

function drawSummary() {
  const columns = allColumns();
  const lead = (place) => [swatch(place)];
  fill("summary", state.data.settings.length ? sortedTable(columns, { key: "sort", first: { host: "summary", lead }, redraw: drawSummary, className: "sorted" })
    : element("p", { className: "quiet", textContent: "No runs." }));
  const told = [];
  if (state.data.settings.some((setting) => setting.runs.length > 1)) told.push("Mean ± standard deviation over the runs of a setting, which differ only in their seed.");
  if (columns.some((column) => bestIn(column).size)) told.push("The best of a column is bold and marked.");
  if (columns.some((column) => column.title.startsWith("rounds to") && column.cells.some((cell) => cell.text.startsWith(">")))) told.push("“>T”: not reached within T rounds.");
  byId("summary-note").textContent = told.join(" ");
}

// The metric, its targets, and what is exported of it.
function drawSummaryControls() {
  const { metrics } = state.data;
  if (!metricOf(state.metric)) state.metric = state.data.metric ?? metrics[0]?.name ?? null;
  for (const { name } of metrics) state.targets[name] ??= state.data.targets[name];
  byId("summary-bar").hidden = !state.data.settings.length;
  byId("goal-bar").hidden = !metrics.length;
  options("metric", metrics.map(({ name, title }) => [name, title]), state.metric);
  const metric = metricOf(state.metric);
  if (!metric) return;
  const input = byId("target");
  if (document.activeElement !== input) input.value = state.targets[metric.name].map((target) => Number(((metric.percent ? 100 : 1) * target).toPrecision(6))).join(", ");
  byId("target-unit").textContent = metric.percent ? "%" : "";
}

function chooseTargets(text) {
  const metric = metricOf(state.metric);
  const numbers = text.split(/[\s,;%]+/).filter(Boolean).map(Number);
  const isGood = numbers.length <= 5 && numbers.every(Number.isFinite);
  byId("target").setAttribute("aria-invalid", String(!isGood));
  if (!isGood) return;
  state.targets[metric.name] = numbers.map((number) => number / (metric.percent ? 100 : 1));
  drawSummary();
  drawBars();
  drawCurves();
}

// The axis that only says how fast a machine was, so that no setting is the best on it.
const WALL_CLOCK = "seconds";

// How much each setting takes to the target: the least first, and those that did not get there last.
function drawBars() {
  const metric = metricOf(state.metric);
  const targets = metric ? state.targets[metric.name] : [];
  byId("bars-title").parentElement.hidden = !targets.length;
  if (!targets.length) return;
  choice("goal", Object.fromEntries(targets.map((target, place) => [String(place), goalText(metric, target)])), "goal", drawBars);
  choose("cost", axisTitles(), "cost", drawBars);
  const target = targets[Number(state.goal)];
  const isRanked = state.cost !== WALL_CLOCK;
  const several = state.data.settings.some((setting) => setting.runs.length > 1) ? ": mean over the runs, and a standard deviation on each side where there are several" : "";
  byId("bars-note").textContent = `What it takes until ${metric.name} is ${metric.better === "higher" ? "at least" : "at most"} ${goalText(metric, target)} for the first time${several}.${isRanked ? "" : " How fast a machine was says little about a setting, so that none is ahead here."}`;
  const found = state.data.settings.map((setting, number) => ({ setting, number, cost: costOf(setting, metric, target, state.cost) }));
  if (isRanked) found.sort((a, b) => (a.cost === null) - (b.cost === null) || (a.cost?.mean ?? 0) - (b.cost?.mean ?? 0));
  const longest = Math.max(...found.map(({ cost }) => (cost ? cost.mean + (cost.deviation ?? 0) : 0)), 0) || 1;
  const soonest = isRanked ? found[0]?.cost?.mean : 0;
  const lacking = (setting) => {
    if (!isMeasured(setting, metric)) return "not measured";
    return costOf(setting, metric, target, "rounds") ? "not counted" : `not within ${plural(notWithin(setting, metric, target), "round")}`;
  };
  fill("bars", ...found.map(({ setting, number, cost }) => barRow(setting, number, cost, longest, soonest, () => lacking(setting))));
}

function costText(value) {
  const axis = state.data.axes[state.cost];
  return axis.unit === "rounds" ? plural(short(value, 3), "round").replace(/^1 rounds/, "1 round") : axisText(axis, value, 3);
}

function barRow(setting, number, cost, longest, soonest, lacking) {
  const bar = element("span", { className: cost ? "fill" : "fill lacking" });
  bar.style.setProperty("--own", colour(number));
  bar.style.width = cost ? `${(100 * cost.mean) / longest}%` : "100%";
  const track = element("span", { className: "track" }, bar);
  if (cost?.deviation) {
    const whisker = element("span", { className: "whisker" });
    const low = Math.max(0, cost.mean - cost.deviation);
    whisker.style.left = `${(100 * low) / longest}%`;
    whisker.style.width = `${(100 * (cost.mean + cost.deviation - low)) / longest}%`;
    track.append(whisker);
  }
  const ratio = cost && soonest > 0 && cost.mean > soonest * 1.005 ? element("span", { className: "quiet", textContent: ` ${(cost.mean / soonest).toFixed(cost.mean / soonest < 10 ? 1 : 0)}×` }) : "";
  // one that is hidden stays in its place, so that nothing below moves
  return element("div", { className: state.hidden.has(setting.label) ? "bar-row faint" : "bar-row" }, element("span", { className: "bar-name", title: setting.label }, swatch(number), element("span", { textContent: setting.label })), track,
    element("span", { className: "bar-value" }, cost ? costText(cost.mean) : lacking(), ratio));
}

// The summary for other programs, letter by letter what the command line writes beside its figures.

const SPECIAL = {
  "\\": "\\textbackslash{}", "&": "\\&", "%": "\\%", "$": "\\$", "#": "\\#", _: "\\_", "{": "\\{", "}": "\\}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}",
  "<": "$<$", ">": "$>$", "±": "$\\pm$", "−": "$-$", "—": "---", "…": "\\dots{}",
};

// A column of means, and one of standard deviations where there are any; what is no number is as the table shows it.
function summaryCsv() {
  const columns = allColumns();
  const spread = columns.map((column) => column.cells.some((cell) => cell.deviation !== null));
  const quoted = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const number = (value) => String(Number(value.toPrecision(12)));
  // a text that no spreadsheet takes for a formula
  const safe = (text) => (/^[=+\-@\t\r]/.test(text) ? `'${text}` : text);
  const rows = [columns.flatMap((column, place) => [column.title, ...(spread[place] ? [`${column.title}, std`] : [])])];
  columns[0].cells.forEach((_, row) => rows.push(columns.flatMap(({ cells }, place) => {
    const { text, mean, deviation } = cells[row];
    return [mean === null ? safe(text) : number(mean), ...(spread[place] ? [deviation === null ? "" : number(deviation)] : [])];
  })));
  return rows.map((row) => `${row.map(quoted).join(",")}\n`).join("");
}

// A tabular with the rules of booktabs; the best of each column is bold.
function summaryLatex() {
  const columns = allColumns();
  const latex = (text) => [...text].map((letter) => SPECIAL[letter] ?? letter).join("");
  const best = columns.map(bestIn);
  const cell = ({ text }, isBest) => {
    const [value, spread] = text.split(" ± ");
    return (isBest ? `\\textbf{${latex(value)}}` : latex(value)) + (spread === undefined ? "" : ` $\\pm$ ${latex(spread)}`);
  };
  const rows = columns[0].cells.map((_, row) => `${columns.map(({ cells }, place) => cell(cells[row], best[place].has(row))).join(" & ")} \\\\`);
  const head = `${columns.map(({ title }) => latex(title)).join(" & ")} \\\\`;
  return ["% needs \\usepackage{booktabs}", `\\begin{tabular}{l${"r".repeat(columns.length - 1)}}`, "\\toprule", head, "\\midrule", ...rows, "\\bottomrule", "\\end{tabular}", ""].join("\n");
}

async function copied(text, button) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // a page that is a file may have no clipboard; the old way works there
    const area = element("textarea", { value: text });
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
  }
  const before = button.textContent;
  button.textContent = done ? "Copied" : "Not allowed";
  setTimeout(() => { button.textContent = before; }, 1200);
}

byId("save-csv").addEventListener("click", () => download("summary.csv", summaryCsv(), "text/csv"));
byId("save-latex").addEventListener("click", () => download("summary.tex", summaryLatex(), "text/plain"));
byId("copy-latex").addEventListener("click", (event) => copied(summaryLatex(), event.currentTarget));
byId("metric").addEventListener("change", (event) => {
  state.metric = event.target.value;
  drawAll();
});
byId("target").addEventListener("input", (event) => chooseTargets(event.target.value));
