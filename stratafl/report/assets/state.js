"use strict";
// What the page shows and how; every drawing function reads from here and nothing else.

const state = {
  data: null, axis: "rounds", view: "mean", logX: false, logY: false, metric: null, targets: {}, goal: "0", cost: "rounds",
  quantity: "drift", driftLog: false, over: "mean", sort: null, run: 0, colour: "", stop: null, node: null, nodeSort: null,
  lineRun: null, lineNetwork: null, lineRound: null, lineSort: null,
  zoom: {}, hidden: new Set(),
};

const COLOURS = 7; // as many as page.css has
// with five styles of lines to seven colours, 35 settings look different, and any two neighbours do in grey, too
const DOTS = "0.1 4.6";
const DASHES = ["", "7 4", DOTS, "9 3.5 1.5 3.5", "13 4"];

function colour(number) {
  return `var(--c${number % COLOURS})`;
}

function dash(number) {
  return DASHES[number % DASHES.length];
}

function theme() {
  return document.documentElement.dataset.theme;
}

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function byId(id) {
  return document.getElementById(id);
}

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// Texts become text nodes, so that nothing a user wrote is ever read as markup.
function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function fill(id, ...children) {
  byId(id).replaceChildren(...children);
}

function plural(number, word) {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}

// One button per option, of which one is pressed. Options that are gone fall back to the first.
function choice(id, options, key, changed) {
  const names = Object.keys(options);
  if (names.length && !names.includes(state[key])) state[key] = names[0];
  const buttons = names.map((name) => {
    const button = element("button", { type: "button", textContent: options[name] });
    button.setAttribute("aria-pressed", String(state[key] === name));
    button.dataset.value = name;
    button.addEventListener("click", () => {
      state[key] = name;
      changed();
      for (const each of byId(id).children) each.setAttribute("aria-pressed", String(each.dataset.value === state[key]));
      [...byId(id).children].find((each) => each.dataset.value === name)?.focus();
    });
    return button;
  });
  fill(id, ...(buttons.length > 1 ? buttons : []));
}

// A button that is pressed or not.
function toggle(id, key, changed) {
  const button = byId(id);
  button.setAttribute("aria-pressed", String(state[key]));
  button.onclick = () => {
    state[key] = !state[key];
    button.setAttribute("aria-pressed", String(state[key]));
    changed();
  };
}

function options(id, names, chosen) {
  const select = byId(id);
  select.replaceChildren(...names.map(([value, text]) => element("option", { value, textContent: text })));
  select.value = chosen;
}

// Columns in even steps travel as three numbers, and one run is its own mean.
function unpacked(data) {
  const column = (points) => (Array.isArray(points) ? points : Array.from({ length: points.count }, (_, place) => points.first + place * points.step));
  const curve = (packed) => ({ ...packed, x: Object.fromEntries(Object.entries(packed.x).map(([name, points]) => [name, column(points)])) });
  const settings = data.settings.map((setting) => {
    const runs = setting.runs.map((run) => ({ ...run, curve: curve(run.curve) }));
    return { ...setting, runs, mean: setting.mean ? curve(setting.mean) : runs[0].curve };
  });
  return { ...data, settings, runs: settings.flatMap((setting, number) => setting.runs.map((run) => ({ ...run, setting, number }))) };
}
