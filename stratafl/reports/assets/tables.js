"use strict";
// Legends, notes and the tables of configs. Text goes in as text, never as HTML.

// A piece of a setting's line, with its colour and its style.
function swatch(number) {
  return svg("svg", { class: "swatch", width: 34, height: 10, viewBox: "0 0 34 10", "aria-hidden": "true" },
    svg("line", { x1: 1, x2: 33, y1: 5, y2: 5, stroke: colour(number), "stroke-width": 2.6, "stroke-dasharray": dash(number) }));
}

function table(head, rows, className = "") {
  const row = (tag, cells) => element("tr", {}, ...cells.map((cell) => element(tag, { textContent: cell })));
  return element("table", { className }, element("thead", {}, row("th", head)), element("tbody", {}, ...rows.map((cells) => row("td", cells))));
}

function statusText(setting) {
  const dead = setting.runs.filter((run) => run.diverged !== null).map((run) => run.diverged);
  const died = dead.length ? [`diverged at round ${Math.min(...dead)}`] : [];
  const going = setting.runs.filter((run) => run.status === "running");
  if (going.length) return [`running ${Math.min(...going.map((run) => run.round))}/${going[0].total}`, ...died].join(", ");
  const odd = setting.runs.filter((run) => run.status !== "done");
  return [...new Set(odd.map((run) => run.status)), ...died].join(", ");
}

function drawLegends() {
  for (const host of document.querySelectorAll("[data-legend]")) {
    const made = state.data.settings.map((setting, number) => chipOf(setting, number));
    const wanted = made.length > 1 ? made : [];
    // a chip that stays is not made anew, so that the browser sees the second of two clicks on it
    const isSame = host.children.length === wanted.length && wanted.every((chip, place) => chip.textContent === host.children[place].textContent);
    if (!isSame) host.replaceChildren(...wanted);
    state.data.settings.forEach(({ label }, place) => host.children[place]?.setAttribute("aria-pressed", String(!state.hidden.has(label))));
  }
}

function chipOf(setting, number) {
  const runs = setting.runs.length > 1 ? `×${setting.runs.length}` : "";
  const badge = [runs, statusText(setting)].filter(Boolean).join(" · ");
  const chip = element("button", { type: "button", title: `${setting.label}: click to hide or show, double-click to see it alone` },
    swatch(number), element("span", { textContent: setting.label }), ...(badge ? [element("span", { className: "badge", textContent: badge })] : []));
  chip.addEventListener("click", (event) => (event.detail === 2 ? alone(setting.label) : flip(setting.label)));
  return chip;
}

function flip(label) {
  if (!state.hidden.delete(label)) state.hidden.add(label);
  drawCharts();
}

function alone(label) {
  const others = state.data.settings.map((setting) => setting.label).filter((other) => other !== label);
  state.hidden = others.every((other) => state.hidden.has(other)) ? new Set() : new Set(others);
  drawCharts();
}

function drawEnvironments() {
  const environments = state.data.environments;
  const keys = [...new Set(environments.flatMap((each) => Object.keys(each)))];
  fill("environments", table(["", ...environments.map((_, number) => (environments.length > 1 ? `machine ${number + 1}` : ""))],
    keys.map((key) => [key, ...environments.map((each) => each[key] ?? "")]), "texts"));
}

const NOTES_SHOWN = 4;

// One line per run that has something to say; what went wrong first.
function drawNotes() {
  const noted = state.data.runs.filter((run) => run.notes.length).sort((a, b) => b.bad - a.bad);
  const lines = [
    ...state.data.unreadable.map((line) => element("li", { className: "bad" }, element("b", { textContent: "Left out" }), ` ${line}`)),
    ...noted.map((run) => element("li", { className: run.bad ? "bad" : "" }, element("b", { textContent: run.title }), ` ${run.notes.join("; ")}`, element("span", { className: "quiet", textContent: ` · ${run.name} ${run.id}` }))),
  ];
  const list = (items) => element("ul", { className: "notes" }, ...items);
  const rest = lines.slice(NOTES_SHOWN);
  const wasOpen = byId("notes").querySelector("details")?.open ?? false;
  fill("notes", ...(lines.length ? [element("div", { className: "card noted" }, list(lines.slice(0, NOTES_SHOWN)),
    ...(rest.length ? [element("details", { open: wasOpen }, element("summary", { textContent: `${rest.length} more` }), list(rest))] : []))] : []));
  const { shared } = state.data;
  const named = [shared["data.source"], shared["model.name"]]
    .filter((name) => name && name !== "in memory" && !name.startsWith("["));
  const common = [...named, ...(shared["tree.shape"] ? [`tree ${shared["tree.shape"]}`] : [])].join(", ");
  byId("subtitle").textContent = [`${plural(state.data.runs.length, "run")}, ${plural(state.data.settings.length, "setting")}`, common, state.data.made].filter(Boolean).join(" · ");
}
