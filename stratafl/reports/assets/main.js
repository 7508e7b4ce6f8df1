"use strict";
// Starts the page, and keeps it fresh where a server stands behind it.

// Everything that shows settings as lines or bars.
function drawCharts() {
  drawLegends();
  drawBars();
  drawCurves();
  drawOverNodes();
  drawDrift();
}

function drawAll() {
  const several = state.data.settings.some((setting) => setting.runs.length > 1);
  state.axis ??= state.data.axis;
  choose("axis", axisTitles(), "axis", drawCharts);
  choice("view", several ? { mean: "mean ± std", runs: "every run" } : { mean: "runs" }, "view", drawCharts);
  drawNotes();
  drawSummaryControls();
  drawSummary();
  drawCharts();
  drawTimeline();
  drawTree();
  drawRuns();
  drawComparison();
  drawEnvironments();
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = name === "dark" ? "Light" : "Dark";
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = null;
setTheme(prefersDark.matches ? "dark" : "light");
prefersDark.addEventListener("change", () => {
  if (!chosenTheme) setTheme(prefersDark.matches ? "dark" : "light");
});
byId("theme").addEventListener("click", () => {
  chosenTheme = theme() === "dark" ? "light" : "dark";
  setTheme(chosenTheme);
});
addEventListener("scroll", () => { byId("tip").hidden = true; }, { passive: true });

async function refresh() {
  try {
    const answer = await fetch("data.json", { cache: "no-store" });
    if (!answer.ok) throw new Error(`answer ${answer.status}`);
    const text = await answer.text();
    if (text !== refresh.last) {
      refresh.last = text;
      state.data = unpacked(JSON.parse(text));
      drawAll();
    }
  } catch (problem) {
    byId("subtitle").textContent = "The server has stopped; this is the last it told.";
  }
  setTimeout(refresh, 2000);
}

state.data = unpacked(JSON.parse(byId("data").textContent));
drawAll();
if (document.documentElement.dataset.live) setTimeout(refresh, 2000);
