"use strict";
// What the page shows and how; every drawing function reads from here and nothing else.

const state = { data: null, axis: "rounds", view: "mean", quantity: "drift", scale: "linear", split: 0, hidden: new Set() };

// Okabe and Ito's colours, which people with any colour vision can tell apart, made lighter for a dark page.
const COLOURS = {
  light: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a87400", "#3d9bd1", "#5b6470"],
  dark: ["#6cb4ee", "#ff9257", "#34c79a", "#e7a3c8", "#efb93c", "#9aa8ff", "#c2c8d2"],
};
const DASHES = ["solid", "dash", "dot", "dashdot"];

function colour(number) {
  const colours = COLOURS[theme()];
  return colours[number % colours.length];
}

function dash(number) {
  return DASHES[Math.floor(number / COLOURS.light.length) % DASHES.length];
}

function theme() {
  return document.documentElement.dataset.theme;
}

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// The plotting library reads its texts as simple HTML; a user's text is to be seen as it is.
function plain(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
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

function fill(id, ...children) {
  document.getElementById(id).replaceChildren(...children);
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
      document.querySelector(`#${id} [data-value="${name}"]`).focus();
    });
    return button;
  });
  fill(id, ...(buttons.length > 1 ? buttons : []));
}
