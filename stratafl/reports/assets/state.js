"use strict";
// What the page shows and how; every drawing function reads from here and nothing else.

const state = {
  data: null, axis: null, shown: "metrics", view: "mean", logX: false, logY: false, metric: null, targets: {}, goal: "0", cost: "rounds",
  quantity: "drift", driftLog: false, over: "mean", sort: null, run: 0, colour: "", stop: null, node: null, nodeSort: null,
  lineRun: null, lineNetwork: null, lineRound: null, lineSort: null,
  runSort: null, runFilter: "", columnFilters: {}, chosenRuns: new Set(), compare: "differing",
  zoom: {}, hidden: new Set(),
};

// The style of a setting’s method; page.css has the colours and dashes by their numbers.
function colour(number) {
  return `var(--c${state.data.settings[number].colour})`;
}

function dash(number) {
  return `var(--d${state.data.settings[number].dash})`;
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

// A list of which one entry is chosen. An entry that is gone falls back to the first.
function choose(id, names, key, changed) {
  if (!(state[key] in names)) state[key] = Object.keys(names)[0];
  options(id, Object.entries(names), state[key]);
  byId(id).onchange = (event) => {
    state[key] = event.target.value;
    changed();
  };
}

function options(id, names, chosen) {
  const select = byId(id);
  select.replaceChildren(...names.map(([value, text]) => element("option", { value, textContent: text })));
  select.value = chosen;
}

// Columns in even steps travel as three numbers, an axis that a run lacks does not travel, and one run is its own mean.
function unpacked(data) {
  const column = (points) => (Array.isArray(points) ? points : Array.from({ length: points.count }, (_, place) => points.first + place * points.step));
  const curve = (packed) => {
    const rounds = column(packed.x.rounds);
    const lacking = rounds.map(() => null);
    return { ...packed, x: Object.fromEntries(Object.keys(data.axes).map((name) => [name, packed.x[name] ? column(packed.x[name]) : lacking])) };
  };
  const settings = data.settings.map((setting) => {
    const runs = setting.runs.map((run) => ({ ...run, curve: curve(run.curve) }));
    return { ...setting, runs, mean: setting.mean ? curve(setting.mean) : runs[0].curve };
  });
  return { ...data, settings, runs: settings.flatMap((setting, number) => setting.runs.map((run) => ({ ...run, setting, number }))) };
}
