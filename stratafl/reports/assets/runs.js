"use strict";
// The table of runs with its filters, and the configs of runs or settings side by side.

function textCell(text) {
  return { text: String(text), mean: null };
}

function numberCell(value, text) {
  return value === null || value === undefined ? textCell("—") : { text, mean: value };
}

function lastOf(points) {
  return points.length ? points[points.length - 1] : null;
}

// Config keys that runs differ in, in one word where that is clear: "lr" for "client.lr", "method" for "method.name". Seeds and tags have columns of their own.
function differingKeys() {
  const keys = [...new Set(state.data.runs.flatMap((run) => Object.keys(run.config)))].filter((key) => !["seed", "storage.tags"].includes(key));
  const words = keys.map((key) => key.replace(/\.name$/, "").split(".").pop());
  return keys.map((key, place) => ({ key, title: words.indexOf(words[place]) === words.lastIndexOf(words[place]) ? words[place] : key }));
}

function runColumns() {
  const { runs, metrics, axes } = state.data;
  const column = (title, cellOf, downFirst = false) => ({ title, downFirst, cells: runs.map(cellOf) });
  const asNumber = (text) => (text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : null);
  const valueCell = (text = "—") => (asNumber(text) === null ? textCell(text) : numberCell(asNumber(text), text));
  const isTagged = runs.some((run) => run.tags.length);
  const bytes = ["bytes", "traffic.1"].filter((name) => name in axes);
  return [
    column("run", (run) => textCell(run.title)),
    ...(isTagged ? [column("tags", (run) => textCell(run.tags.join(", ")))] : []),
    ...differingKeys().map(({ key, title }) => column(title, (run) => valueCell(run.config[key]))),
    column("seed", (run) => valueCell(String(run.seed ?? "—"))),
    column("status", (run) => textCell(run.diverged === null ? run.status : `${run.status}, diverged at round ${run.diverged}`)),
    column("rounds", (run) => numberCell(run.round, run.round === run.total ? String(run.round) : `${run.round} of ${run.total}`)),
    ...metrics.map((metric) => column(`${metric.name}${metric.percent ? ", %" : ""}`, ({ diverged, curve }) => {
      const values = (curve.y[metric.name] ?? []).filter((value) => value !== null);
      return metricCell(metric, diverged === null && values.length ? { mean: lastOf(values), deviation: null } : null);
    }, metric.better === "higher")),
    ...bytes.map((name) => column(axes[name].title, ({ curve }) => numberCell(lastOf(curve.x[name]), bytesText(lastOf(curve.x[name]) ?? 0)))),
    column("wall-clock s", ({ curve }) => numberCell(lastOf(curve.x.seconds), short(lastOf(curve.x.seconds) ?? 0, 3))),
    column("folder", (run) => textCell(`${run.name} ${run.id}`)),
  ];
}

const COMPARISONS = { "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b };

// Whether a cell is what its column is filtered by: a part of its text, a whole text after "=", or a number after a sign.
function isMatch(cell, filter) {
  const text = cell.text.toLowerCase();
  const [, sign, rest] = /^(<=|>=|<|>|=)?(.*)$/.exec(filter.trim().toLowerCase());
  const value = rest.trim();
  if (!value) return true;
  if (sign in COMPARISONS) return cell.mean !== null && Number.isFinite(Number(value)) && COMPARISONS[sign](cell.mean, Number(value));
  return sign === "=" ? text === value : text.includes(value);
}

function drawRuns() {
  const columns = runColumns();
  const active = document.activeElement?.closest?.("#run-list .filters input") ? document.activeElement : null;
  const [focused, from, to] = active ? [active.dataset.column, active.selectionStart, active.selectionEnd] : [];
  const lead = (place) => [checkbox(state.data.runs[place]), swatch(state.data.runs[place].number)];
  const made = columns[0].cells.length ? sortedTable(columns, { key: "runSort", first: { host: "run-list", lead }, redraw: drawRuns, className: "sorted" })
    : element("p", { className: "quiet", textContent: "No runs." });
  made.tHead?.append(element("tr", { className: "filters" }, ...columns.map(({ title }) => element("th", {}, columnFilter(title, columns)))));
  fill("run-list", made);
  filterRuns(columns);
  const again = [...byId("run-list").querySelectorAll(".filters input")].find((input) => input.dataset.column === focused);
  again?.focus();
  again?.setSelectionRange(from, to);
  const search = byId("run-filter");
  search.oninput = () => {
    state.runFilter = search.value;
    filterRuns(columns);
  };
}

function columnFilter(title, columns) {
  const input = element("input", { type: "text", value: state.columnFilters[title] ?? "", ariaLabel: `filter by ${title}`, autocomplete: "off", title: "A part of the text, =text, or a number: >0.9" });
  input.dataset.column = title;
  input.addEventListener("input", () => {
    state.columnFilters[title] = input.value;
    filterRuns(columns);
  });
  return input;
}

// Hides the rows that lack a word of the text, or do not match the filter of a column.
function filterRuns(columns) {
  const words = state.runFilter.toLowerCase().split(/\s+/).filter(Boolean);
  const filters = columns.filter(({ title }) => state.columnFilters[title]);
  let shown = 0;
  for (const row of byId("run-list").querySelectorAll("tbody tr")) {
    const place = Number(row.dataset.place);
    const text = columns.map(({ cells }) => cells[place].text).join("\n").toLowerCase();
    const isShown = words.every((word) => text.includes(word)) && filters.every(({ title, cells }) => isMatch(cells[place], state.columnFilters[title]));
    row.hidden = !isShown;
    shown += isShown;
  }
  const total = state.data.runs.length;
  byId("run-count").textContent = shown === total ? plural(total, "run") : `${shown} of ${plural(total, "run")}`;
}

function checkbox(run) {
  const box = element("input", { type: "checkbox", checked: state.chosenRuns.has(run.id), ariaLabel: `compare ${run.title}` });
  box.addEventListener("change", () => {
    if (box.checked) state.chosenRuns.add(run.id);
    else state.chosenRuns.delete(run.id);
    drawComparison();
  });
  return box;
}

// What is compared: the runs that are chosen in the table, or all settings; each with its config as texts by key.
function compared() {
  const { runs, settings, shared } = state.data;
  const chosen = runs.filter((run) => state.chosenRuns.has(run.id));
  if (chosen.length > 1) return chosen.map((run) => ({ title: run.title, number: run.number, config: { ...shared, ...run.config } }));
  return settings.map((setting, number) => {
    const keys = new Set(setting.runs.flatMap((run) => Object.keys(run.config)));
    const own = [...keys].map((key) => [key, [...new Set(setting.runs.map((run) => run.config[key] ?? "—"))].sort((a, b) => a.localeCompare(b, "en", { numeric: true })).join(", ")]);
    return { title: setting.label, number, config: { ...shared, ...Object.fromEntries(own) } };
  });
}

function drawComparison() {
  const columns = compared();
  const count = state.data.runs.filter((run) => state.chosenRuns.has(run.id)).length;
  byId("choose-none").hidden = !count;
  byId("compare-note").textContent = count > 1 ? `${count} runs chosen in the table above.` : `All settings; choose two or more runs in the table above to compare these${count ? " (one is chosen)" : ""}.`;
  choice("compare", { differing: "what differs", all: "every key" }, "compare", drawComparison);
  const keys = [...new Set(columns.flatMap(({ config }) => Object.keys(config)))].sort();
  const rows = keys.map((key) => [key, ...columns.map(({ config }) => config[key] ?? "—")]);
  const isDiffering = ([, ...values]) => new Set(values).size > 1;
  const shown = rows.filter((row) => state.compare === "all" || isDiffering(row));
  if (!shown.length) return fill("differences", element("p", { className: "quiet", textContent: columns.length > 1 ? "The configs are the same." : "There is one setting only." }));
  const made = table(["key", ...columns.map(({ title }) => title)], shown, "texts");
  [...made.tHead.rows[0].cells].slice(1).forEach((cell, place) => cell.prepend(swatch(columns[place].number)));
  shown.forEach((row, place) => made.tBodies[0].rows[place].classList.toggle("differing", state.compare === "all" && isDiffering(row)));
  fill("differences", made);
}

byId("choose-none").addEventListener("click", () => {
  state.chosenRuns.clear();
  drawRuns();
  drawComparison();
});
