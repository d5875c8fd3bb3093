"use strict";
// Shows /api/v1/stream. All text of peers is put in by textContent, never as HTML.

const SVG = "http://www.w3.org/2000/svg";
const MOST_IN_PICTURE = 48;
const MOST_EVENTS = 60;

const byId = (id) => document.getElementById(id);
let job = null;
let sorted = { key: "name", down: false };

// ---- Numbers

function number(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "–" : String(value);
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= size) return (value / (unit === "k" ? 1e3 : size)).toFixed(1) + " " + unit;
  }
  return Math.abs(value) >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toPrecision(3);
}
const bytes = (value) => (value ? number(value) + "B" : "–");
const perSecond = (value) => (value ? bytes(value) + "/s" : "–");
function latency(value) {
  if (value === null || value === undefined) return "–";
  return value < 1e-3 ? (value * 1e6).toFixed(0) + " µs" : (value * 1e3).toFixed(1) + " ms";
}
function duration(seconds) {
  if (seconds < 90) return seconds.toFixed(0) + " s";
  if (seconds < 5400) return (seconds / 60).toFixed(0) + " min";
  return (seconds / 3600).toFixed(1) + " h";
}
const clock = (time) => new Date(time * 1000).toLocaleTimeString();

// ---- Elements

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}
function draw(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
function title(element, text) {
  element.append(Object.assign(draw("title", {}), { textContent: text }));
  return element;
}

// ---- Groups

const LEGEND = {
  gather: "waits for gradients", reduce: "sums them", deliver: "waits for the loop",
  computes: "before its last contribution", waits: "without the slowest member",
};

function sparkline(points, label) {
  const known = points.filter(([, value]) => value !== null);
  const box = make("div");
  const last = known.length ? known[known.length - 1][1] : null;
  box.append(make("div", "dim", label + ": " + number(last)));
  const svg = draw("svg", { viewBox: "0 0 300 48", preserveAspectRatio: "none", height: 48, class: "spark", role: "img", "aria-label": label });
  if (known.length > 1) {
    const values = known.map(([, value]) => value);
    const low = Math.min(...values), span = Math.max(...values) - low || 1;
    const from = known[0][0], time = known[known.length - 1][0] - from || 1;
    const line = known.map(([at, value]) => `${((at - from) / time * 300).toFixed(1)},${(46 - (value - low) / span * 44).toFixed(1)}`);
    svg.append(draw("path", { d: "M" + line.join("L") }));
  }
  box.append(svg);
  return box;
}

const PHASES = ["gather", "reduce", "deliver"];

function roundText(round) {
  const parts = [`round ${round.version}: ${latency(round.seconds)}`];
  for (const phase of PHASES) parts.push(`${phase} ${latency(round[phase])}`);
  parts.push(`batch ${round.batch_size}`, `${Object.keys(round.contributors).length} contributors`);
  if (round.skipped) parts.push(`${round.skipped} without gradients`);
  if (round.slowest) parts.push(`without ${round.slowest}`);
  return parts.join(", ");
}

// A bar is a round: its phases from below, then what the leader itself computed.
function roundsChart(rounds) {
  const svg = draw("svg", { viewBox: `0 0 ${64 * 6} 52`, preserveAspectRatio: "none", height: 52, class: "rounds", role: "img", "aria-label": "time of each round" });
  // One round that took long must not make lines of the others.
  const ordered = rounds.map((round) => round.seconds).sort((a, b) => a - b);
  const longest = Math.max(Math.min(ordered[ordered.length - 1], 4 * ordered[ordered.length >> 1]), 1e-9);
  rounds.forEach((round, i) => {
    const bar = draw("g", {});
    const height = Math.min(44, Math.max(1, round.seconds / longest * 44));
    bar.append(draw("rect", { x: i * 6, y: 46 - height, width: 5, height, class: "computes" }));
    let top = 46;
    for (const phase of PHASES) {
      const part = Math.min((round[phase] || 0) / longest * 44, height - (46 - top));
      top -= part;
      bar.append(draw("rect", { x: i * 6, y: top, width: 5, height: part, class: phase }));
    }
    if (round.slowest) bar.append(draw("rect", { x: i * 6, y: 48, width: 5, height: 3, class: "waits" }));
    svg.append(title(bar, roundText(round)));
  });
  return svg;
}

function modelView(model) {
  const box = make("div", "model");
  box.append(make("h3", "", model.name));
  const facts = make("div", "dim");
  facts.textContent = `version ${model.version}, led by ${model.leader || "no member yet"}`;
  if (model.rounds.length) facts.textContent += `, last round ${duration(Math.max(0, job.time - model.rounds[model.rounds.length - 1].time))} ago`;
  box.append(facts);
  if (model.rounds.length) {
    const longest = Math.max(...model.rounds.map((round) => round.seconds));
    box.append(make("div", "dim", `last ${model.rounds.length} rounds, the longest ${latency(longest)}`));
    box.append(roundsChart(model.rounds));
    const legend = make("div", "dim phases");
    for (const phase of [...PHASES, "computes", "waits"]) legend.append(make("span", phase, LEGEND[phase]));
    box.append(legend, make("div", "dim last", roundText(model.rounds[model.rounds.length - 1])));
  }
  if (model.awaited) box.append(make("div", "slow", `nothing for ${duration(model.still)}: waits for ${model.awaited}`));
  else if (model.waiting_for.length) box.append(make("div", "slow", "waits for " + model.waiting_for.join(", ")));
  if (model.slowest) {
    const count = model.contributions[model.slowest];
    const most = Math.max(...Object.values(model.contributions));
    box.append(make("div", "slow", `slowest: ${model.slowest}, with ${count} contributions to the last ${Math.min(16, model.rounds.length)} rounds; the fastest member made ${most}`));
  }
  return box;
}

function groupView(group) {
  const card = make("article", "card");
  card.dataset.group = group.name;
  card.append(make("h2", "", group.name));
  const facts = make("div", "facts");
  const history = group.history;
  const last = history.length ? history[history.length - 1] : [0, null, null];
  const items = [["members", group.members.length], ["epoch", group.epoch], ["steps/s", number(last[1])]];
  if (last[2] !== null) items.push(["return", number(last[2])]);
  for (const [name, value] of items) {
    const fact = make("span", "dim", " " + name);
    fact.prepend(make("b", "", String(value)));
    facts.append(fact);
  }
  card.append(facts);
  const charts = make("div", "charts");
  charts.append(sparkline(history.map(([time, steps]) => [time, steps]), "environment steps/s"));
  if (history.some((point) => point[2] !== null)) {
    charts.append(sparkline(history.map(([time, , value]) => [time, value]), "return"));
  }
  card.append(charts);
  for (const model of group.models) card.append(modelView(model));
  return card;
}

// ---- Members

const COLUMNS = [
  ["name", "Name", (m) => m.name],
  ["state", "State", (m) => m.state],
  ["why", "Notes", (m) => m.why || Object.entries(m.own).map(([n, v]) => `${n} ${number(v)}`).join(", ")],
  ["role", "Role", (m) => m.role],
  ["groups", "Groups", (m) => m.groups.join(", ")],
  ["host", "Host", (m) => m.host + (m.pid ? ":" + m.pid : "")],
  ["version", "Version", (m) => m.version, number],
  ["steps", "Steps/s", (m) => m.rates.steps, number],
  ["calls", "Calls/s", (m) => m.rates.calls, number],
  ["sent", "Sent", (m) => m.rates.sent, perSecond],
  ["received", "Received", (m) => m.rates.received, perSecond],
  ["cpu", "CPU", (m) => m.rates.cpu, (v) => (v === undefined ? "–" : (v * 100).toFixed(0) + " %")],
  ["memory", "Memory", (m) => m.memory, bytes],
  ["latency", "To broker", (m) => m.latency, (v, m) => (v === null ? "–" : `${m.path} ${latency(v)}`)],
  ["age", "Joined", (m) => m.age, (v) => duration(v) + " ago"],
];
const TEXT = new Set(["name", "state", "role", "groups", "host", "why"]);
const rows = new Map();

function header() {
  for (const [key, label] of COLUMNS) {
    const cell = make("th", TEXT.has(key) ? "" : "number", label);
    cell.tabIndex = 0;
    const sort = () => {
      sorted = { key, down: sorted.key === key ? !sorted.down : !TEXT.has(key) };
      showMembers();
    };
    cell.addEventListener("click", sort);
    cell.addEventListener("keydown", (event) => event.key === "Enter" && sort());
    byId("columns").append(cell);
  }
}

function newRow() {
  const row = make("tr");
  for (const [key] of COLUMNS) {
    row.append(make("td", key === "why" || key === "state" ? key : TEXT.has(key) ? "" : "number"));
  }
  return row;
}

function compare(a, b) {
  const [, , read] = COLUMNS.find(([key]) => key === sorted.key);
  const x = read(a) ?? -Infinity, y = read(b) ?? -Infinity;
  const order = typeof x === "string" ? x.localeCompare(String(y), undefined, { numeric: true }) : x - y;
  return sorted.down ? -order : order;
}

function showMembers() {
  if (!job) return;
  const wanted = byId("filter").value.toLowerCase();
  const shown = job.members.filter((m) => !wanted || `${m.name} ${m.host} ${m.state} ${m.role} ${m.groups}`.toLowerCase().includes(wanted));
  // Members that need help come first.
  const wrong = (member) => (member.state === "up" || member.state === "new" ? 1 : 0);
  shown.sort((a, b) => wrong(a) - wrong(b) || compare(a, b));
  [...byId("columns").children].forEach((cell, i) => {
    const here = COLUMNS[i][0] === sorted.key;
    cell.ariaSort = here ? (sorted.down ? "descending" : "ascending") : "none";
  });
  const body = byId("members");
  const names = new Set(shown.map((m) => m.name));
  for (const [name, row] of rows) {
    if (!names.has(name)) { row.remove(); rows.delete(name); }
  }
  shown.forEach((member, i) => {
    let row = rows.get(member.name);
    if (!row) {
      rows.set(member.name, (row = newRow()));
      row.addEventListener("click", () => explain(member.name, job.broker.name));
    }
    row.className = member.state;
    COLUMNS.forEach(([key, , read, show], column) => {
      const value = read(member);
      const cell = row.children[column];
      setText(cell, show ? show(value, member) : String(value));
      if (key === "why") cell.title = cell.textContent;
    });
    if (body.children[i] !== row) body.insertBefore(row, body.children[i] || null);
  });
  const gone = job.members.filter((m) => m.state === "gone").length;
  setText(byId("count"), `${job.members.length - gone}` + (gone ? `, ${gone} gone` : ""));
}

// ---- Paths

function showPaths() {
  const holder = byId("paths"), legend = byId("legend");
  const members = job.members.filter((member) => member.state !== "gone");
  if (members.length > MOST_IN_PICTURE) {
    holder.replaceChildren();
    const counts = {};
    for (const member of job.members) for (const [, path] of member.paths) counts[path] = (counts[path] || 0) + 1;
    const parts = Object.entries(counts).map(([path, count]) => `${path}: ${count}`);
    legend.textContent = `Too many members for a picture. Connections by path: ${parts.join(", ") || "none"}. Click a member to see its path to the broker.`;
    return;
  }
  const all = [...members.map((m) => m.name), job.broker.name];
  const place = new Map(all.map((name, i) => {
    const angle = (i / all.length) * 2 * Math.PI - Math.PI / 2;
    return [name, [320 + 190 * Math.cos(angle), 230 + 190 * Math.sin(angle)]];
  }));
  const svg = draw("svg", { viewBox: "0 0 640 460", role: "img", "aria-label": "paths between members" });
  const drawn = new Set();
  for (const member of members) {
    for (const [peer, path, seconds] of member.paths) {
      const pair = [member.name, peer].sort().join("\0");
      if (!place.has(peer) || drawn.has(pair)) continue;
      drawn.add(pair);
      const [[x1, y1], [x2, y2]] = [place.get(member.name), place.get(peer)];
      const line = title(draw("line", { x1, y1, x2, y2, class: path }), `${member.name} – ${peer}: ${path}, ${latency(seconds)}. Click to see why.`);
      line.addEventListener("click", () => explain(member.name, peer));
      svg.append(line);
    }
  }
  for (const [name, [x, y]] of place) {
    const member = members.find((m) => m.name === name);
    svg.append(draw("circle", { cx: x, cy: y, r: 6, class: member ? member.state : "" }));
    const anchor = x < 300 ? "end" : x > 340 ? "start" : "middle";
    const text = draw("text", { x: x + (anchor === "end" ? -10 : anchor === "start" ? 10 : 0), y: y + (anchor === "middle" ? (y < 230 ? -12 : 22) : 4), "text-anchor": anchor });
    text.textContent = name.length > 20 ? name.slice(0, 19) + "…" : name;
    svg.append(text);
  }
  holder.replaceChildren(svg);
  legend.textContent = "Green: shared memory. Blue: RDMA. Amber: TCP. Click a line to see why this path is used.";
}

async function explain(member, peer) {
  const box = byId("explained");
  box.hidden = false;
  box.textContent = `${member} – ${peer}: asking …`;
  const query = new URLSearchParams({ member, peer });
  let told;
  try {
    told = await (await fetch("api/v1/explain?" + query)).json();
  } catch (failed) {
    told = { error: String(failed) };
  }
  box.replaceChildren(make("b", "", `${member} – ${peer}`));
  if (told.error) { box.append(make("div", "", told.error)); return; }
  box.append(make("div", "", told.reason));
  for (const path of told.paths) {
    box.append(make("div", "dim", `${path.path}: ${path.state}` + (path.reason ? `, ${path.reason}` : "")));
  }
}

// ---- Events

function showEvents() {
  const items = job.events.slice(-MOST_EVENTS).reverse().map((event) => {
    const place = event.groups.join(", ") || "the broker";
    const verb = { joined: "joined", left: "left", gone: "has gone from" }[event.kind] || (event.kind === "recovered" ? "has recovered in" : `is ${event.kind} in`);
    const text = `${clock(event.time)}  ${event.member} ${verb} ${place}`;
    return make("li", event.kind, event.why ? `${text}: ${event.why}` : text);
  });
  byId("events").replaceChildren(...items);
}

// ---- Live

function show() {
  const { broker } = job;
  setText(byId("broker"), `${broker.name}, moolink ${job.version}, up ${duration(job.uptime)}, ${bytes(broker.resident_memory_bytes)}`);
  byId("empty").hidden = job.members.length > 0;
  // A chart or line under the pointer, and selected text, stay as they are: they are being read.
  if (!isRead(byId("groups"))) byId("groups").replaceChildren(...job.groups.map(groupView));
  showMembers();
  if (!isRead(byId("paths"))) showPaths();
  if (!isRead(byId("events"))) showEvents();
}

function isRead(element) {
  const selection = document.getSelection();
  return element.querySelector("line:hover, .rounds:hover") !== null || (!selection.isCollapsed && element.contains(selection.anchorNode));
}

function follow() {
  const link = byId("link");
  const source = new EventSource("api/v1/stream");
  const lost = (text) => {
    link.className = "badge lost";
    setText(link, text);
  };
  source.onmessage = (message) => {
    try {
      job = JSON.parse(message.data);
      if (!document.hidden) show();
    } catch (failed) {
      lost(`cannot be shown: ${failed}`);
      return;
    }
    link.className = "badge live";
    setText(link, "live");
  };
  source.onerror = async () => {
    lost("broker not reached");
    if (source.readyState !== EventSource.CLOSED) return;  // else the browser tries again itself
    const answer = await fetch("api/v1/job").catch(() => null);
    if (answer && answer.status === 401) location.href = "login";
    else setTimeout(follow, 2000);
  };
}

header();
byId("filter").addEventListener("input", showMembers);
document.addEventListener("visibilitychange", () => job && !document.hidden && show());
follow();
