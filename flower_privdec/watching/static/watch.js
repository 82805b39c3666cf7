// Asks for what is known once a second, and shows it. All text is set as text, never as markup: peers may say anything.
"use strict";

const EVERY = 1000; // milliseconds between two questions
const NODE = 15; // of a peer's mark in the graph
const CROWDED = 24; // peers beyond which marks are small
const SVG = "http://www.w3.org/2000/svg";
const STATES = {
  up: ["", "answers"],
  waiting: ["…", "answers, and waits"],
  starting: ["", "starts"],
  unknown: ["", "nothing heard yet"],
  silent: ["?", "does not answer"],
  gone: ["×", "its process has ended"],
  done: ["✓", "done"],
  left: ["–", "left, or was shut out"],
};
const EDGES = {
  up: ["", "edge up"],
  down: ["×", "edge down"],
  refused: ["!", "neighbour quarantined"],
  done: ["", "an end is done, or left"],
  unknown: ["", "not known"],
};
const BAD = new Set(["silent", "gone", "quarantine", "doubt", "edge-down", "edge-refused"]);

const one = (id) => document.getElementById(id);

function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function drawing(name, attributes = {}, text = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

function number(value, digits = 3) {
  return typeof value === "number" ? value.toPrecision(digits) : "–";
}

function bytes(count) {
  if (typeof count !== "number") return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (count < 1000) return `${count < 10 && unit !== "B" ? count.toFixed(1) : Math.round(count)} ${unit}`;
    count /= 1024;
  }
  return `${count.toFixed(1)} TiB`;
}

// ε is rounded up: it is never shown too small.
function epsilon(value) {
  if (value === "inf") return "∞";
  if (typeof value !== "number") return "–";
  if (value <= 0) return "0";
  const unit = 10 ** (Math.floor(Math.log10(value)) - 2);
  const decimals = Math.max(0, 2 - Math.floor(Math.log10(value)));
  return (Math.ceil(value / unit - 1e-9) * unit).toFixed(Math.min(decimals, 20));
}

function tick(value) {
  return value >= 0 && value <= 1 ? `${Math.round(100 * value)} %` : number(value);
}

function share(value) {
  return typeof value === "number" && value >= 0 && value <= 1 ? `${(100 * value).toFixed(1)} %` : number(value);
}

// --- the graph ---

function shape(state, size) {
  const mark = drawing("g", {class: `node ${state}`});
  if (state === "gone" || state === "done" || state === "left") {
    mark.append(drawing("rect", {x: -size, y: -size, width: 2 * size, height: 2 * size}));
  } else if (state === "silent") {
    const far = 1.25 * size;
    mark.append(drawing("polygon", {points: `0,${-far} ${far},0 0,${far} ${-far},0`}));
  } else {
    mark.append(drawing("circle", {r: size}));
  }
  if (state === "waiting") mark.append(drawing("circle", {r: size + 4, class: "ring"}));
  return mark;
}

function edge(state, from, to) {
  const mark = drawing("g", {class: `edge ${state}`});
  mark.append(drawing("line", {x1: from[0], y1: from[1], x2: to[0], y2: to[1]}));
  const sign = EDGES[state][0];
  if (sign) mark.append(drawing("text", {x: (from[0] + to[0]) / 2, y: (from[1] + to[1]) / 2}, sign));
  return mark;
}

function place(peer, count) {
  if (count === 1) return [200, 200];
  const angle = (2 * Math.PI * peer) / count - Math.PI / 2;
  return [200 + 155 * Math.cos(angle), 200 + 155 * Math.sin(angle)];
}

function arrow(from, to, size) {
  const far = Math.hypot(to[0] - from[0], to[1] - from[1]) || 1;
  const way = [(to[0] - from[0]) / far, (to[1] - from[1]) / far];
  const bend = [-way[1] * 12, way[0] * 12]; // beside the edge
  const start = [from[0] + way[0] * (size + 5) + bend[0], from[1] + way[1] * (size + 5) + bend[1]];
  const end = [to[0] - way[0] * (size + 12) + bend[0] / 2, to[1] - way[1] * (size + 12) + bend[1] / 2];
  const mark = drawing("g", {class: "waits"});
  mark.append(drawing("path", {class: "wait", d: `M${start.join(" ")}L${end.join(" ")}`}));
  const left = [end[0] - way[0] * 8 - way[1] * 5, end[1] - way[1] * 8 + way[0] * 5];
  const right = [end[0] - way[0] * 8 + way[1] * 5, end[1] - way[1] * 8 - way[0] * 5];
  mark.append(drawing("polygon", {class: "arrow", points: [end, left, right].map((at) => at.join(",")).join(" ")}));
  return mark;
}

function showGraph(state) {
  const graph = one("graph");
  graph.replaceChildren();
  if (!state.is_drawn) {
    graph.append(drawing("text", {x: 200, y: 200, "text-anchor": "middle"}, `${state.n_peers} peers: see the table`));
    return;
  }
  const count = state.n_peers;
  const size = count > CROWDED ? Math.max(4, 360 / count) : NODE;
  graph.setAttribute("class", count > CROWDED ? "crowded" : "");
  // What is wrong is drawn last, so that nothing hides it.
  const order = ["unknown", "done", "up", "refused", "down"];
  const edges = state.edges.filter(([, , how]) => how in EDGES).sort((a, b) => order.indexOf(a[2]) - order.indexOf(b[2]));
  for (const [i, j, how] of edges) {
    const mark = edge(how, place(i, count), place(j, count));
    mark.dataset.edge = `${i}-${j}`;
    mark.append(drawing("title", {}, `${i} – ${j}: ${EDGES[how][1]}`));
    graph.append(mark);
  }
  for (const peer of state.peers) {
    for (const other of peer.awaited || []) {
      if (other < count) graph.append(arrow(place(peer.peer, count), place(other, count), size));
    }
  }
  for (const peer of state.peers) {
    const at = place(peer.peer, count);
    const mark = shape(peer.state, size);
    mark.setAttribute("transform", `translate(${at[0]} ${at[1]})`);
    mark.dataset.peer = peer.peer;
    if (size >= 9) mark.append(drawing("text", {}, String(peer.peer)));
    const sign = STATES[peer.state][0];
    const out = [(at[0] - 200) / 155, (at[1] - 200) / 155];
    const far = size + (size < 9 ? 22 : 14);
    const beside = size < 9 ? `${sign} ${peer.peer}` : sign; // small marks have no number in them
    if (sign) mark.append(drawing("text", {class: "mark", x: out[0] * far || far, y: out[1] * far}, beside));
    mark.append(drawing("title", {}, `peer ${peer.peer}: ${STATES[peer.state][1]}`));
    graph.append(mark);
  }
}

function showLegend() {
  const legend = one("legend");
  for (const [name, [sign, words]] of Object.entries(STATES)) {
    const sample = drawing("svg", {viewBox: "0 0 38 18", "aria-hidden": "true"});
    const mark = shape(name, 5);
    mark.setAttribute("transform", "translate(12 9)");
    sample.append(mark);
    if (sign) sample.append(drawing("text", {x: 26, y: 13}, sign));
    legend.append(item(sample, words));
  }
  for (const [name, [, words]] of Object.entries(EDGES)) {
    const sample = drawing("svg", {viewBox: "0 0 38 18", "aria-hidden": "true"});
    sample.append(edge(name, [1, 9], [37, 9]));
    legend.append(item(sample, words));
  }
  const sample = drawing("svg", {viewBox: "0 0 38 18", "aria-hidden": "true"});
  sample.append(arrow([0, 3], [48, 3], 0));
  legend.append(item(sample, "waits for"));
}

function item(sample, words) {
  const made = element("li");
  made.append(sample, words);
  return made;
}

// --- curves ---

function showCurve(id, points, lines, format) {
  const svg = one(id);
  svg.replaceChildren();
  const found = points.filter((point) => typeof point.mean === "number");
  if (!found.length) {
    svg.append(drawing("text", {x: 200, y: 80, "text-anchor": "middle", class: "soft"}, lines.none));
    return;
  }
  const all = found.flatMap((point) => [point.mean, point.least ?? point.mean, point.most ?? point.mean]);
  const top = Math.max(...all, lines.top ?? 0) || 1;
  const bottom = Math.min(0, ...all);
  const first = found[0].round;
  const last = found[found.length - 1].round;
  const x = (round) => 44 + (last > first ? ((round - first) / (last - first)) * 340 : 170);
  const y = (value) => 136 - ((value - bottom) / (top - bottom)) * 122;
  for (const value of [bottom, (top + bottom) / 2, top]) {
    svg.append(drawing("line", {class: "axis", x1: 44, x2: 384, y1: y(value), y2: y(value)}));
    svg.append(drawing("text", {x: 40, y: y(value) + 4, "text-anchor": "end", class: "soft"}, format(value)));
  }
  svg.append(drawing("text", {x: 44, y: 154, class: "soft"}, `round ${first}`));
  svg.append(drawing("text", {x: 384, y: 154, "text-anchor": "end", class: "soft"}, String(last)));
  const banded = found.filter((point) => typeof point.least === "number" && typeof point.most === "number");
  if (banded.length > 1) {
    const up = banded.map((point) => `${x(point.round)},${y(point.most)}`);
    const down = banded.map((point) => `${x(point.round)},${y(point.least)}`).reverse();
    svg.append(drawing("polygon", {class: "band", points: [...up, ...down].join(" ")}));
  }
  const line = found.map((point) => `${x(point.round)},${y(point.mean)}`);
  svg.append(drawing("polyline", {class: "curve", points: line.join(" ")}));
  if (found.length === 1) svg.append(drawing("circle", {class: "curve", cx: x(first), cy: y(found[0].mean), r: 3}));
}

function showCurves(state) {
  const quality = state.quality[state.quality.length - 1];
  const metric = state.metric || "quality";
  const whose = triedOf(state);
  const now = quality ? `: ${share(quality.mean)} (${share(quality.least)} to ${share(quality.most)}${whose})` : "";
  one("quality-title").textContent = `${metric[0].toUpperCase()}${metric.slice(1)} on public data${now}`;
  showCurve("quality", state.quality, {none: "not evaluated yet", top: metric === "accuracy" ? 1 : 0}, tick);
  if (state.is_deployed) {
    showSpread(state, metric, whose);
    return;
  }
  const distance = state.consensus[state.consensus.length - 1];
  one("consensus-title").textContent = `Consensus distance${distance ? `: ${number(distance.mean)}` : ""}`;
  one("consensus-note").textContent = "";
  showCurve("consensus", state.consensus, {none: "not evaluated yet"}, number);
}

// Whose models the figures are of, if not of all.
function triedOf(state) {
  if (!state.tried) return "";
  const count = `${state.tried.peers} of ${state.tried.of} peers`;
  return state.is_sample ? `, of a sample of ${count}: others may be lower or higher` : `, of ${count}`;
}

// Peers show nobody their models, so what is known of their agreement is how far apart these are on public data.
function showSpread(state, metric, whose) {
  const points = state.quality
    .filter((point) => typeof point.least === "number" && typeof point.most === "number")
    .map((point) => ({round: point.round, mean: point.most - point.least}));
  const last = points[points.length - 1];
  one("consensus-title").textContent = `Spread of ${metric} between peers${last ? `: ${share(last.mean)}${whose}` : ""}`;
  one("consensus-note").textContent =
    "The consensus distance is not known: deployed peers show nobody their models. Models that agree have no spread, " +
    "but models without a spread need not agree.";
  showCurve("consensus", points, {none: "not evaluated yet"}, share);
}

// --- the table ---

function cell(row, text, className = "") {
  row.append(element("td", text, className));
}

function budgetCell(peer) {
  const made = element("td");
  const budget = typeof peer.budget === "number" ? ` of ${epsilon(peer.budget)}` : "";
  made.append(`${epsilon(peer.epsilon)}${budget} `);
  if (typeof peer.budget === "number" && typeof peer.epsilon === "number") {
    const meter = element("meter");
    meter.max = peer.budget;
    meter.value = peer.epsilon;
    meter.high = 0.9 * peer.budget;
    made.append(meter);
  }
  const others = Object.entries(peer.adversaries || {});
  if (others.length > 1) made.title = others.map(([name, value]) => `${name}: ${epsilon(value)}`).join(", ");
  return made;
}

function showPeers(state) {
  one("metric").textContent = state.metric || "public data";
  const rows = state.peers.map((peer) => {
    const row = element("tr", "", peer.state);
    row.dataset.peer = peer.peer;
    const sign = STATES[peer.state][0];
    cell(row, String(peer.peer), "number");
    cell(row, `${sign} ${peer.state}`.trim(), "state");
    cell(row, peer.round === undefined ? "–" : `${peer.round} / ${peer.rounds}`, "number");
    row.append(budgetCell(peer));
    const figure = (peer.figures || {})[state.metric];
    cell(row, typeof figure === "number" ? share(figure) : typeof peer.loss === "number" ? `loss ${number(peer.loss)}` : "–", "number");
    const who = (peer.awaited || []).length ? ` (${peer.awaited.length === 1 ? "peer" : "peers"} ${peer.awaited.join(", ")})` : "";
    cell(row, peer.waits_for ? `${peer.waits_for}${who}` : "");
    cell(row, peer.neighbours === undefined ? "–" : `${peer.up} / ${peer.neighbours}`, "number");
    cell(row, bytes(peer.sent), "number");
    cell(row, bytes(peer.received), "number");
    cell(row, peer.retries === undefined ? "–" : String(peer.retries), "number");
    const notes = [];
    if (peer.insecure) notes.push("INSECURE seeds: for tests");
    if (peer.idle) notes.push(peer.idle);
    if (peer.end) notes.push(`ended: ${peer.end}`);
    if (peer.why) notes.push(peer.why);
    if (peer.state === "silent" && typeof peer.age === "number") notes.push(`last heard ${Math.round(peer.age)} s ago`);
    if (peer.starts > 1) notes.push(`started ${peer.starts} times`);
    cell(row, notes.join("; "));
    return row;
  });
  one("peers").tBodies[0].replaceChildren(...rows);
}

function showEvents(state) {
  const items = state.events.slice().reverse().map((event) => {
    const made = element("li", "", BAD.has(event.kind) ? "bad" : "");
    const at = new Date(1000 * event.at);
    const time = element("time", at.toLocaleTimeString());
    time.dateTime = at.toISOString();
    const who = event.peer === null ? "" : `peer ${event.peer} `;
    made.append(time, `${who}${event.text}`);
    return made;
  });
  one("events").replaceChildren(...items);
}

function show(state) {
  document.title = `${state.name} – privdec watch`;
  one("name").textContent = state.name;
  one("where").textContent = state.where;
  const counts = {};
  for (const peer of state.peers) counts[peer.state] = (counts[peer.state] || 0) + 1;
  const said = Object.entries(counts).map(([name, count]) => `${count} ${name}`);
  const down = state.edges.filter(([, , how]) => how === "down" || how === "refused").length;
  const edges = down ? `; ${down} of ${state.edges.length} edges down` : "";
  one("summary").textContent = `${state.n_peers} peers: ${said.join(", ")}${edges}${state.finished ? `. ${state.finished}` : ""}`;
  showGraph(state);
  showCurves(state);
  showPeers(state);
  showEvents(state);
}

let seen = 0; // when the last answer came

async function ask() {
  const stale = one("stale");
  try {
    const answer = await fetch("/state.json", {cache: "no-store"});
    if (!answer.ok) throw new Error(`it answers ${answer.status}`);
    show(await answer.json());
    seen = Date.now();
    stale.hidden = true;
  } catch (error) {
    const since = seen ? `; what is shown is of ${new Date(seen).toLocaleTimeString()}` : "";
    stale.textContent = `privdec watch does not answer (${error.message})${since}`;
    stale.hidden = false;
  }
  setTimeout(ask, EVERY);
}

showLegend();
ask();
