"use strict";
// Starts the page, and keeps it fresh where a server stands behind it.

function drawSettings() {
  drawLegends();
  drawCurves();
  drawDrift();
}

function drawAll() {
  const several = state.data.settings.some((setting) => setting.runs.length > 1);
  const axes = Object.keys(state.data.axes);
  choice("axis", Object.fromEntries(axes.map((name) => [name, name])), "axis", drawAll);
  choice("view", several ? { mean: "mean ± std", runs: "every run" } : { mean: "mean" }, "view", drawAll);
  drawNotes();
  drawSummary();
  drawSettings();
  drawTree();
  drawConfig();
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = name === "dark" ? "Light" : "Dark";
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = null;
setTheme(prefersDark.matches ? "dark" : "light");
prefersDark.addEventListener("change", () => {
  if (chosenTheme) return;
  setTheme(prefersDark.matches ? "dark" : "light");
  drawAll();
});
document.getElementById("theme").addEventListener("click", () => {
  chosenTheme = theme() === "dark" ? "light" : "dark";
  setTheme(chosenTheme);
  drawAll();
});
document.getElementById("split").addEventListener("change", (event) => {
  state.split = Number(event.target.value);
  drawTree();
});

async function refresh() {
  try {
    const answer = await fetch("data.json", { cache: "no-store" });
    if (!answer.ok) throw new Error(`answer ${answer.status}`);
    const text = await answer.text();
    if (text !== refresh.last) {
      refresh.last = text;
      state.data = JSON.parse(text);
      drawAll();
    }
  } catch (problem) {
    document.getElementById("subtitle").textContent = "The server has stopped; this is the last it told.";
  }
  setTimeout(refresh, 2000);
}

state.data = JSON.parse(document.getElementById("data").textContent);
drawAll();
if (document.documentElement.dataset.live) setTimeout(refresh, 2000);
