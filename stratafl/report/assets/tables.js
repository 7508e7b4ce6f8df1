"use strict";
// Tables and what stands around them. Text goes in as text, never as HTML.

function swatch(number) {
  const made = element("span", { className: "swatch" });
  made.style.borderTopColor = colour(number);
  made.style.borderTopStyle = { solid: "solid", dash: "dashed", dot: "dotted", dashdot: "dashed" }[dash(number)];
  return made;
}

function table(head, rows, className = "") {
  const row = (tag, cells) => element("tr", {}, ...cells.map((cell) => (cell instanceof Node ? cell : element(tag, { textContent: cell }))));
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
    const chips = state.data.settings.map((setting, number) => {
      const runs = setting.runs.length > 1 ? `×${setting.runs.length}` : "";
      const badge = [runs, statusText(setting)].filter(Boolean).join(" · ");
      const chip = element("button", { type: "button", title: "Click to hide or show; double-click to see it alone" },
        swatch(number), element("span", { textContent: setting.label }), ...(badge ? [element("span", { className: "badge", textContent: badge })] : []));
      chip.setAttribute("aria-pressed", String(!state.hidden.has(setting.label)));
      chip.addEventListener("click", (event) => clicked(event, setting.label, host, number));
      return chip;
    });
    host.replaceChildren(...(state.data.settings.length > 1 ? chips : []));
  }
}

let lastClick = { label: null, time: 0 };

// The first click of two makes new chips, so that no one of them sees both and the browser counts one each.
function clicked(event, label, host, number) {
  const second = lastClick.label === label && event.timeStamp - lastClick.time < 400;
  if (second) alone(label);
  else toggle(label, host, number);
  lastClick = { label: second ? null : label, time: performance.now() };
}

function toggle(label, host, number) {
  if (!state.hidden.delete(label)) state.hidden.add(label);
  drawSettings();
  host.children[number].focus();
}

function alone(label) {
  const others = state.data.settings.map((setting) => setting.label).filter((other) => other !== label);
  state.hidden = others.every((other) => state.hidden.has(other)) ? new Set() : new Set(others);
  drawSettings();
}

function drawSummary() {
  const { head, rows } = state.data.summary;
  const made = table(head, rows.map(([label, ...rest], number) => [element("td", {}, swatch(number), label), ...rest]));
  fill("summary", rows.length ? made : element("p", { className: "quiet", textContent: "No runs." }));
  const several = state.data.settings.some((setting) => setting.runs.length > 1);
  const told = several ? ["Mean ± standard deviation over the runs of a setting, which differ only in their seed."] : [];
  if (state.data.targets.length && rows.some((row) => row.some((cell) => cell.startsWith(">")))) told.push("“>T”: not reached within T rounds.");
  document.getElementById("summary-note").textContent = told.join(" ");
}

function drawConfig() {
  const labels = state.data.settings.map((setting) => setting.label);
  const differing = Object.entries(state.data.differences);
  fill("differences", differing.length
    ? table(["key", ...labels], differing.map(([key, values]) => [key, ...values]), "texts")
    : element("p", { className: "quiet", textContent: labels.length > 1 ? "The configs are the same." : "There is one setting only." }));
  fill("shared", table(["key", "value"], Object.entries(state.data.shared), "texts"));
  const environments = state.data.environments;
  const keys = [...new Set(environments.flatMap((each) => Object.keys(each)))];
  fill("environments", table(["", ...environments.map((_, number) => (environments.length > 1 ? `machine ${number + 1}` : ""))],
    keys.map((key) => [key, ...environments.map((each) => each[key] ?? "")]), "texts"));
}

function drawNotes() {
  const notes = state.data.unreadable.map((line) => `Left out: ${line}`);
  for (const setting of state.data.settings) {
    for (const run of setting.runs) {
      if (run.diverged !== null) notes.push(`${run.name} ${run.id}: diverged at round ${run.diverged}: from there on its test loss is not finite`);
      if (run.status === "failed" || run.status === "interrupted") {
        notes.push(`${run.name} ${run.id}: ${run.status} after ${run.round} of ${run.total} rounds${run.reason ? `: ${run.reason}` : ""}`);
      }
    }
  }
  fill("notes", ...notes.map((text) => element("p", { className: "note", textContent: text })));
  const count = state.data.settings.reduce((sum, setting) => sum + setting.runs.length, 0);
  const plural = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
  document.getElementById("subtitle").textContent =
    `${plural(count, "run")}, ${plural(state.data.settings.length, "setting")} · ${state.data.made}`;
}
