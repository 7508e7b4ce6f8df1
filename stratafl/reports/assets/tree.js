"use strict";
// One run's tree: who belongs to whom, how each did round by round, how many samples each holds, and of which classes.

const ROW = 40; // a level's height
const BARS = 72; // that of the samples
const FEW_CLASSES = 30;

// Where each node lies: a node spans the nodes of the lowest drawn level below it.
function places(levels) {
  const last = levels.length - 1;
  const spans = levels.map((level) => level.names.map(() => [Infinity, -Infinity]));
  levels[last].names.forEach((_, node) => {
    for (let level = last, at = node; level >= 0; at = levels[level].parents[at], level -= 1) {
      const span = spans[level][at];
      span[0] = Math.min(span[0], node);
      span[1] = Math.max(span[1], node + 1);
    }
  });
  return spans;
}

function treeRun() {
  return state.data.runs[state.run];
}

// What the tree can be coloured by: {values(level, node, round), rounds, format, range, unit}.
function colourings(run, tree) {
  const found = {};
  for (const metric of state.data.metrics) {
    const byLevel = run.nodes?.values[metric.name];
    if (!byLevel) continue;
    const rounds = run.nodes.rounds;
    const root = rounds.map((round) => run.curve.y[metric.name]?.[run.curve.x.rounds.indexOf(round)] ?? null);
    found[metric.name] = { title: metric.name, rounds, format: metric.percent ? (value) => percentText(value, 3) : (value) => short(value, 3),
      at: (level, node, stop) => byLevel[level]?.[stop]?.[node] ?? (level === 0 ? root[stop] : null) };
  }
  for (const [name, { title, unit }] of Object.entries(state.data.quantities).slice(0, 3)) {
    const columns = tree.levels.map((_, level) => run.curve.y[`drift.${level}.${name}`]);
    if (!columns.some(Boolean)) continue;
    found[`drift.${name}`] = { title, unit, perLevel: true, rounds: run.curve.x.rounds, format: (value) => short(value, 3), at: (level, node, stop) => columns[level]?.[stop] ?? null };
  }
  found.samples = { title: "samples", rounds: [], format: (value) => value.toLocaleString("en"), at: (level, node) => (level === tree.levels.length - 1 ? tree.levels[level].samples[node] : null) };
  return found;
}

function rangeOf(colouring, tree) {
  let [low, high] = [Infinity, -Infinity];
  for (let stop = 0; stop < Math.max(1, colouring.rounds.length); stop += 1) {
    tree.levels.forEach((level, number) => {
      for (let node = 0; node < (colouring.perLevel ? 1 : level.names.length); node += 1) {
        const value = colouring.at(number, node, stop);
        if (value !== null) [low, high] = [Math.min(low, value), Math.max(high, value)];
      }
    });
  }
  return low > high ? null : [low, high];
}

function drawTree() {
  const drawable = state.data.runs.map((run, place) => [run, place]).filter(([run]) => run.tree !== null);
  byId("tree-title").parentElement.hidden = drawable.length === 0;
  if (!drawable.length) return;
  if (!drawable.some(([, place]) => place === state.run)) state.run = drawable[0][1];
  options("split", drawable.map(([run, place]) => [String(place), run.title]), String(state.run));
  const run = treeRun();
  const tree = state.data.trees[run.tree];
  const found = colourings(run, tree);
  choice("colour", Object.fromEntries(Object.entries(found).map(([name, { title }]) => [name, title])), "colour", drawTree);
  const host = byId("tree");
  const few = tree.classes.length <= FEW_CLASSES;
  host.view = { run, tree, colouring: found[state.colour], range: rangeOf(found[state.colour], tree), spans: places(tree.levels), few };
  const mix = few ? 18 * tree.classes.length : 280;
  host.style.height = `${8 + ROW * tree.levels.length + 24 + BARS + 24 + mix + 30}px`;
  host.redraw = () => renderTree(host);
  rooms.observe(host);
  renderTree(host);
  drawSlider();
  drawKey();
  const missing = tree.left_out.length ? ` ${tree.left_out.join(" and ")} nodes further down are too many to draw.` : "";
  byId("tree-note").textContent = `Top: the tree, root first${found[state.colour].perLevel ? ", a level in one colour, since this is known of levels" : ""}. Middle: samples of each. Bottom: which share of its samples is of which class.${missing}`;
}

function renderTree(host) {
  const { tree, spans, few } = host.view;
  const { levels, classes } = tree;
  const leaves = levels[levels.length - 1];
  const [width, height] = [host.clientWidth, host.clientHeight];
  const names = classes.map((name) => fitted(name, Math.min(150, width / 3)));
  const left = 14 + Math.max(52, ...(few ? names.map((name) => textWidth(name)) : []));
  const box = { left, right: width - 12, top: 8, bars: 8 + ROW * levels.length + 24, mix: 8 + ROW * levels.length + 24 + BARS + 24, bottom: height - 30 };
  const unit = (box.right - box.left) / leaves.names.length;
  const gap = unit > 8 ? 2 : unit > 3 ? 0.75 : 0;
  const picture = svg("svg", { class: "chart", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Tree and label mix" });
  const side = (y, text) => svg("text", { x: box.left - 10, y, "font-size": 12, "text-anchor": "end", fill: "var(--quiet)" }, text);
  host.cells = [];
  levels.forEach((level, number) => {
    const y = box.top + ROW * number;
    picture.append(side(y + ROW / 2 + 3, number === 0 ? "root" : number === levels.length - 1 && !tree.left_out.length ? "clients" : levels.length === 3 ? "groups" : `level ${number}`));
    level.names.forEach((name, node) => {
      const [from, to] = spans[number][node];
      if (from > to) return; // nothing of it is drawn below
      const room = (to - from) * unit - gap;
      const cell = svg("rect", { class: "cell", x: box.left + from * unit, y, width: Math.max(0.2, room), height: ROW - 3, rx: room > 12 ? 4 : 0, fill: "var(--heat)" });
      const own = name.split("/").pop() || name;
      const text = room < 14 ? null : svg("text", { x: box.left + ((from + to) / 2) * unit - gap / 2, y: y + ROW / 2 + 3, "font-size": 12, "text-anchor": "middle", "pointer-events": "none" });
      host.cells.push({ cell, text, level: number, node, room, own });
      picture.append(cell, ...(text ? [text] : []));
    });
  });
  picture.append(...samplesOf(leaves, box, unit, gap, side), ...mixOf(leaves, classes, names, box, unit, gap, few, side));
  picture.append(svg("text", { x: (box.left + box.right) / 2, y: height - 8, "font-size": 12, "text-anchor": "middle", fill: "var(--quiet)" }, tree.left_out.length ? "nodes" : "clients"));
  host.box = box;
  host.replaceChildren(picture);
  paint(host);
  picture.addEventListener("pointermove", (event) => nodeHover(host, event));
  picture.addEventListener("pointerdown", (event) => nodeHover(host, event));
  picture.addEventListener("pointerleave", () => { byId("tip").hidden = true; });
}

function samplesOf(leaves, box, unit, gap, side) {
  const most = Math.max(1, ...leaves.samples);
  const bars = leaves.samples.map((count, node) => {
    const tall = (BARS * count) / most;
    return svg("rect", { class: "sample", x: box.left + node * unit, y: box.bars + BARS - tall, width: Math.max(0.2, unit - gap), height: tall, fill: "var(--heat)", "fill-opacity": 0.75, rx: unit > 12 ? 2 : 0 });
  });
  return [side(box.bars + 10, short(most)), side(box.bars + BARS, "samples"), svg("line", { x1: box.left, x2: box.right, y1: box.bars + BARS, y2: box.bars + BARS, stroke: "var(--line)" }), ...bars];
}

// Shares of classes, the largest in full colour: a cell each, or one picture where there are very many.
function mixOf(leaves, classes, names, box, unit, gap, few, side) {
  const tall = (box.bottom - box.mix) / Math.max(1, classes.length);
  const shares = leaves.labels.map((counts) => {
    const total = Math.max(1, counts.reduce((sum, count) => sum + count, 0));
    return counts.map((count) => count / total);
  });
  const most = shares.reduce((high, share) => share.reduce((a, b) => Math.max(a, b), high), 0) || 1;
  const shade = (share) => (share ? 0.08 + (0.92 * share) / most : 0);
  const made = few ? names.map((name, number) => side(box.mix + (number + 0.5) * tall + 4, name)) : [side(box.mix + 12, "classes")];
  if (shares.length * classes.length <= 6000) {
    shares.forEach((share, node) => classes.forEach((_, number) => {
      if (share[number]) made.push(svg("rect", { class: "share", x: box.left + node * unit, y: box.mix + number * tall, width: Math.max(0.2, unit - gap), height: Math.max(0.2, tall - (few ? 2 : 0)), rx: few && unit > 12 ? 2 : 0, fill: "var(--heat)", "fill-opacity": shade(share[number]).toFixed(3) }));
    }));
    return made;
  }
  const canvas = element("canvas", { width: shares.length, height: classes.length });
  const brush = canvas.getContext("2d");
  const pixels = brush.createImageData(canvas.width, canvas.height);
  const ink = style("--heat").match(/\w\w/g).map((part) => parseInt(part, 16));
  shares.forEach((share, node) => share.forEach((value, number) => pixels.data.set([...ink, Math.round(255 * shade(value))], 4 * (number * canvas.width + node))));
  brush.putImageData(pixels, 0, 0);
  made.push(svg("image", { class: "share", x: box.left, y: box.mix, width: box.right - box.left, height: box.bottom - box.mix, preserveAspectRatio: "none", "image-rendering": "pixelated", href: canvas.toDataURL() }));
  return made;
}

function stopNow() {
  const { rounds } = byId("tree").view.colouring;
  if (!rounds.length) return 0;
  if (state.stop === null) return rounds.length - 1;
  const after = rounds.findIndex((round) => round >= state.stop);
  return after < 0 ? rounds.length - 1 : after;
}

// Only colours change when the slider moves.
function paint(host) {
  const { colouring, range } = host.view;
  const stop = stopNow();
  for (const { cell, text, level, node, room, own } of host.cells) {
    const value = colouring.at(level, node, stop);
    const share = value === null || !range ? null : range[1] > range[0] ? (value - range[0]) / (range[1] - range[0]) : 1;
    const opacity = share === null ? 1 : 0.1 + 0.9 * share;
    cell.setAttribute("fill", share === null ? "var(--blank)" : "var(--heat)");
    cell.setAttribute("fill-opacity", opacity.toFixed(3));
    if (!text) continue;
    text.setAttribute("fill", share !== null && opacity > 0.55 ? "var(--on-heat)" : "var(--ink)");
    text.replaceChildren(...cellText(own, value === null ? "" : colouring.format(value), room - 8, text.getAttribute("x")));
  }
  if (byId("nodes").open) drawNodeTable();
}

// A name and a value: in one line where there is room, in two, or the name alone.
function cellText(own, value, room, x) {
  const together = value ? `${own} · ${value}` : own;
  if (textWidth(together) < room) return [together];
  if (value && textWidth(own, 11) < room && textWidth(value, 11) < room) {
    const line = (text, dy) => svg("tspan", { x, dy, "font-size": 11 }, text);
    return [line(own, -6), line(value, 13)];
  }
  return textWidth(own) < room + 4 ? [own] : [];
}

function drawSlider() {
  const { colouring } = byId("tree").view;
  const { rounds } = colouring;
  byId("slider").hidden = rounds.length < 2;
  const stop = stopNow();
  const input = byId("stop");
  input.max = String(Math.max(0, rounds.length - 1));
  input.value = String(stop);
  const text = rounds.length ? `round ${rounds[stop]} of ${rounds[rounds.length - 1]}` : "";
  byId("stop-text").textContent = text;
  input.setAttribute("aria-valuetext", text);
}

function moveTo(stop) {
  const host = byId("tree");
  const { rounds } = host.view.colouring;
  // at the end it stays at the end while new rounds come in
  state.stop = stop >= rounds.length - 1 ? null : rounds[stop];
  drawSlider();
  paint(host);
}

let playing = null;

function play() {
  const stopPlaying = () => {
    clearInterval(playing);
    playing = null;
    byId("play").textContent = "Play";
  };
  if (playing) return stopPlaying();
  const { rounds } = byId("tree").view.colouring;
  let stop = stopNow() === rounds.length - 1 ? 0 : stopNow();
  moveTo(stop);
  byId("play").textContent = "Stop";
  playing = setInterval(() => {
    stop += 1;
    moveTo(stop);
    if (stop >= byId("tree").view.colouring.rounds.length - 1) stopPlaying();
  }, Math.max(40, Math.min(300, 6000 / rounds.length)));
}

function drawKey() {
  const { colouring, range } = byId("tree").view;
  const unit = colouring.unit ? ` (${colouring.unit})` : "";
  fill("key", ...(range ? [element("span", { textContent: colouring.format(range[0]) }), element("span", { className: "ramp" }), element("span", { textContent: `${colouring.format(range[1])} ${colouring.title}${unit}` })] : []));
}

function shareText(labels, classes) {
  const total = labels.reduce((sum, count) => sum + count, 0);
  const ranked = labels.map((count, number) => [count, number]).filter(([count]) => count > 0).sort((a, b) => b[0] - a[0]);
  const told = ranked.slice(0, 5).map(([count, number]) => `${classes[number] ?? number} ${Math.round((100 * count) / total)} %`);
  return told.join(", ") + (ranked.length > 5 ? `, ${ranked.length - 5} more` : "");
}

// The metrics of one node in the round the slider is at, as [name, text].
function nodeMetrics(run, level, node) {
  if (!run.nodes) return [];
  const round = byId("tree").view.colouring.rounds[stopNow()] ?? run.nodes.rounds[run.nodes.rounds.length - 1];
  const after = run.nodes.rounds.findIndex((each) => each >= round);
  const stop = after < 0 ? run.nodes.rounds.length - 1 : after;
  return state.data.metrics.filter(({ name }) => run.nodes.values[name]).map((metric) => {
    const root = level === 0 ? run.curve.y[metric.name]?.[run.curve.x.rounds.indexOf(run.nodes.rounds[stop])] : null;
    const value = run.nodes.values[metric.name][level]?.[stop]?.[node] ?? root ?? null;
    return { metric, value, text: value === null ? "—" : metric.percent ? percentText(value, 3) : short(value, 4) };
  });
}

function nodeHover(host, event) {
  const { tree, spans, run } = host.view;
  const { box } = host;
  const frame = host.getBoundingClientRect();
  const [x, y] = [event.clientX - frame.left, event.clientY - frame.top];
  const last = tree.levels.length - 1;
  const column = Math.floor(((x - box.left) / (box.right - box.left)) * tree.levels[last].names.length);
  const isInTree = y < box.bars - 10;
  const level = isInTree ? Math.floor((y - box.top) / ROW) : last;
  const node = level >= 0 && level <= last && x >= box.left && x < box.right ? spans[level].findIndex(([from, to]) => column >= from && column < to) : -1;
  if (node < 0) {
    byId("tip").hidden = true;
    return;
  }
  const here = tree.levels[level];
  const weight = level > 0 && here.weights[node] !== null ? `, weight ${here.weights[node].toPrecision(3)}` : "";
  const rows = nodeMetrics(run, level, node).filter(({ value }) => value !== null).map(({ metric, text }) => element("div", { className: "told" }, element("span", { textContent: metric.name }), element("b", { textContent: text })));
  const label = Math.floor(((y - box.mix) / (box.bottom - box.mix)) * tree.classes.length);
  const inMix = y >= box.mix && label >= 0 && label < tree.classes.length;
  const mix = inMix ? `class ${tree.classes[label]}: ${here.labels[node][label] ?? 0} of ${here.samples[node]}` : shareText(here.labels[node], tree.classes);
  tell(host, event.clientX, event.clientY + 10, element("div", { className: "head", textContent: level === 0 ? "root" : here.names[node] }), ...rows,
    element("div", { className: "quiet", textContent: `${here.samples[node].toLocaleString("en")} samples${weight}` }), element("div", { className: "quiet", textContent: mix }));
}

// The same for those who do not hover, at the round the slider is at.
function drawNodeTable() {
  const { tree, run } = byId("tree").view;
  const nodes = tree.levels.flatMap((level, number) => level.names.map((name, node) => ({ level: number, node, name: number === 0 ? "root" : name })));
  const number = (value) => ({ text: value === null ? "—" : value.toLocaleString("en"), mean: value, deviation: null });
  const columns = [
    { title: "node", better: "", cells: nodes.map(({ name }) => ({ text: name, mean: null, deviation: null })) },
    { title: "level", better: "", cells: nodes.map(({ level }) => number(level)) },
    { title: "samples", better: "", cells: nodes.map(({ level, node }) => number(tree.levels[level].samples[node])) },
  ];
  const metrics = nodes.map(({ level, node }) => nodeMetrics(run, level, node));
  (metrics[0] ?? []).forEach(({ metric }, place) => columns.push({ title: metric.name, better: "", cells: metrics.map((each) => ({ text: each[place].text, mean: each[place].value, deviation: null })) }));
  fill("node-table", sortedTable(columns, { key: "nodeSort", first: { host: "node-table", lead: () => [] }, redraw: drawNodeTable, className: "sorted" }));
}

byId("stop").addEventListener("input", (event) => moveTo(Number(event.target.value)));
byId("play").addEventListener("click", play);
byId("split").addEventListener("change", (event) => {
  state.run = Number(event.target.value);
  drawTree();
});
byId("nodes").addEventListener("toggle", () => {
  if (byId("nodes").open) drawNodeTable();
});
