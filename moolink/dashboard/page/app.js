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
const bytes = (value) => (value ? number(value) + (value >= 1e4 ? "B" : " B") : "–");
// For an axis, whose marks are round numbers.
const brief = (value) => number(value).replace(/\.0(?= )/, "");
const milliseconds = (value) => `${Number((value * 1e3).toPrecision(3))} ms`;
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
const several = (count, thing) => `${number(count)} ${thing}${count === 1 ? "" : "s"}`;
// The group whose key a peer has shown ("": none) and its name identify it.
const keyOf = (group, name) => `${group}\u001f${name}`;
const label = ({ group, name }) => (group ? `${group}/${name}` : name);
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

// ---- Charts

const LEFT = 54, RIGHT = 8, TOP = 6, BOTTOM = 18;  // of a chart, around its lines
const TIMES = [10, 30, 60, 120, 300];  // seconds between two marks of the time axis

// The width of each of `columns` charts side by side; a narrow page has them one below the other.
function roomFor(columns) {
  const room = byId("groups").clientWidth - 26;
  return room < 640 ? room : (room - 16 * (columns - 1)) / columns;
}

// Round numbers that divide the span from `low` to `high` into about `count` parts.
function marks(low, high, count) {
  if (high - low <= 1e-12 * Math.max(Math.abs(low), Math.abs(high))) return [low];  // below a step's resolution
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(at * step);
  return found;
}

function frame(width, height, label, low, high, show) {
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "chart", role: "img", "aria-label": label });
  const y = (value) => height - BOTTOM - (value - low) / (high - low) * (height - TOP - BOTTOM);
  for (const value of marks(low, high, 4)) {
    svg.append(draw("line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value), class: "grid" }));
    const text = draw("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" });
    text.textContent = show(value);
    svg.append(text);
  }
  return [svg, y];
}

function mark(svg, x, height, label, anchor = "middle") {
  const text = draw("text", { x, y: height - 4, "text-anchor": anchor });
  text.textContent = label;
  svg.append(text);
}

// Calls `at` with the place of the pointer in the chart, and with null when it leaves.
function follows(svg, at) {
  svg.addEventListener("pointermove", (event) => at(event.clientX - svg.getBoundingClientRect().left));
  svg.addEventListener("pointerleave", () => at(null));
}

function timeChart(points, label, unit, width, height) {
  const known = points.filter(([, value]) => value !== null);
  const box = make("figure");
  const said = make("span", "dim");
  const last = known.length ? known[known.length - 1] : null;
  const say = (point) => setText(said, point ? `${number(point[1])} ${unit}` + (point === last ? "" : ` at ${clock(point[0])}`) : "");
  const caption = make("figcaption", "", `${label} `);
  caption.append(said);
  box.append(caption);
  say(last);
  let low = Math.min(...known.map(([, value]) => value)), high = Math.max(...known.map(([, value]) => value));
  if (!known.length) [low, high] = [0, 1];
  if (low > 0 && low < high / 2 || low === high) low = Math.min(0, low);
  if (low === high) high = low + 1;
  const [svg, y] = frame(width, height, label, low, high, brief);
  const to = last ? last[0] : 0, from = Math.min(known.length ? known[0][0] : 0, to - 30);
  const x = (time) => LEFT + (time - from) / (to - from) * (width - LEFT - RIGHT);
  const step = TIMES.find((seconds) => (to - from) / seconds <= width / 90) || 300;
  for (let ago = step; x(to - ago) >= LEFT - 1; ago += step) mark(svg, x(to - ago), height, ago < 60 ? `−${ago} s` : `−${ago / 60} min`);
  mark(svg, width - RIGHT, height, "now", "end");
  svg.append(draw("path", { d: "M" + known.map(([time, value]) => `${x(time).toFixed(1)},${y(value).toFixed(1)}`).join("L"), class: "line" }));
  const pointer = draw("line", { y1: TOP, y2: height - BOTTOM, class: "pointer", visibility: "hidden" });
  const dot = draw("circle", { r: 3.5, class: "dot", visibility: "hidden" });
  svg.append(pointer, dot);
  follows(svg, (place) => {
    const near = place === null || !known.length ? null
      : known.reduce((best, point) => (Math.abs(x(point[0]) - place) < Math.abs(x(best[0]) - place) ? point : best));
    for (const element of [pointer, dot]) element.setAttribute("visibility", near ? "visible" : "hidden");
    if (near) {
      for (const end of ["x1", "x2"]) pointer.setAttribute(end, x(near[0]));
      dot.setAttribute("cx", x(near[0]));
      dot.setAttribute("cy", y(near[1]));
    }
    say(near || last);
  });
  box.append(svg);
  return box;
}

// ---- Rounds

// The words of the program's own reports (`phase_seconds`, /metrics) for the phases of a round.
const PHASES = ["compute", "gather", "reduce", "deliver"];
const LEGEND = {
  compute: "compute: the leader, before its last contribution",
  gather: "gather: waits for contributions",
  reduce: "reduce: the group sums them",
  deliver: "deliver: waits for the leader's loop",
  without: "without the slowest member",
};

function phasesOf(round) {
  const rest = round.seconds - (round.gather || 0) - round.reduce - round.deliver;
  return { ...round, compute: round.gather === null ? null : Math.max(0, rest) };
}

function roundText(round) {
  const times = phasesOf(round);
  const parts = [`round ${round.version}: ${latency(round.seconds)}`];
  for (const phase of PHASES) parts.push(`${phase} ${latency(times[phase])}`);
  parts.push(`batch ${round.batch_size}`, several(Object.keys(round.contributors).length, "contributor"));
  if (round.skipped) parts.push(`${round.skipped} without gradients`);
  if (round.slowest) parts.push(`without ${round.slowest}`);
  return parts.join(", ");
}

// A bar is a round: deliver, reduce and gather from below are its end, compute its beginning.
function roundsChart(rounds, width, height, say) {
  // One round that took long must not make lines of the others.
  const ordered = rounds.map((round) => round.seconds).sort((a, b) => a - b);
  const high = Math.max(Math.min(ordered[ordered.length - 1], 4 * ordered[ordered.length >> 1]), 1e-9);
  const [svg, y] = frame(width, height, "time of each round", 0, high, milliseconds);
  svg.classList.add("rounds");
  const step = (width - LEFT - RIGHT) / Math.max(rounds.length, 24);
  const floor = y(0);
  rounds.forEach((round, i) => {
    const bar = draw("g", {}), x = LEFT + i * step, times = phasesOf(round);
    let top = floor;
    for (const phase of [...PHASES].reverse()) {
      const until = Math.max(y(high), top - (floor - y(times[phase] || 0)));
      bar.append(draw("rect", { x, y: until, width: step * 0.85, height: top - until, class: phase }));
      top = until;
    }
    if (round.slowest) bar.append(draw("rect", { x, y: floor + 1, width: step * 0.85, height: 3, class: "without" }));
    svg.append(bar);
  });
  mark(svg, LEFT, height, `round ${rounds[0].version}`, "start");
  mark(svg, width - RIGHT, height, `round ${rounds[rounds.length - 1].version}`, "end");
  follows(svg, (place) => {
    const i = place === null ? -1 : Math.floor((place - LEFT) / step);
    say(rounds[i] || rounds[rounds.length - 1]);
  });
  return svg;
}

function modelView(model) {
  const box = make("div", "model");
  box.append(make("h3", "", model.name));
  const facts = make("div", "dim");
  facts.textContent = `version ${model.version}, led by ${model.leader || "no member yet"}`;
  if (model.rounds.length) {
    const longest = Math.max(...model.rounds.map((round) => round.seconds));
    const ago = duration(Math.max(0, job.time - model.rounds[model.rounds.length - 1].time));
    facts.textContent += `, last round ${ago} ago; of the last ${several(model.rounds.length, "round")} the longest took ${latency(longest)}`;
  }
  box.append(facts);
  if (model.awaited) box.append(make("div", "slow", `nothing for ${duration(model.still)}: waits for ${model.awaited}`));
  else if (model.waiting_for.length) box.append(make("div", "slow", "waits for " + model.waiting_for.join(", ")));
  if (model.slowest) {
    const most = Math.max(...Object.values(model.contributions));
    box.append(make("div", "slow", `slowest: ${model.slowest}, with ${several(model.contributions[model.slowest], "contribution")} to the last ${several(Math.min(16, model.rounds.length), "round")}; the fastest member made ${most}`));
  }
  if (model.rounds.length) {
    const said = make("div", "dim said");
    const say = (round) => setText(said, roundText(round));
    box.append(roundsChart(model.rounds, roomFor(1), 130, say));
    const legend = make("div", "dim phases");
    for (const phase of [...PHASES, "without"]) legend.append(make("span", phase, LEGEND[phase]));
    box.append(said, legend);
    say(model.rounds[model.rounds.length - 1]);
  }
  return box;
}

// ---- Groups

// Of each counter with a target: how far it is.
function progress(model) {
  const items = Object.entries(model.target).map(([name, target]) => [`${name} of ${number(target)}`, number(model.totals[name] || 0)]);
  if (!items.length && model.totals.steps !== undefined) items.push(["steps in all", number(model.totals.steps)]);
  if (model.left) items.push(["left", `about ${duration(model.left)}`]);
  return items;
}

function groupView(group) {
  const card = make("article", "card");
  card.dataset.group = group.name;
  card.append(make("h2", "", group.name));
  for (const script of group.scripts) card.append(make("div", "dim script", script));
  if (group.environments.length) card.append(make("div", "dim", `environment: ${group.environments.join(", ")}`));
  const facts = make("div", "facts");
  const history = group.history;
  const last = history.length ? history[history.length - 1] : [0, null, null];
  const items = [[group.members.length === 1 ? "member" : "members", group.members.length], ["steps/s", number(last[1])]];
  if (last[2] !== null) items.push(["return", number(last[2])]);
  for (const model of group.models) items.push(...progress(model));
  for (const [name, value] of items) {
    const fact = make("span", "dim", " " + name);
    fact.prepend(make("b", "", String(value)));
    facts.append(fact);
  }
  card.append(facts);
  const returns = history.some((point) => point[2] !== null);
  const width = roomFor(returns ? 2 : 1);
  const charts = make("div", "charts");
  charts.append(timeChart(history.map(([time, steps]) => [time, steps]), "environment steps per second", "steps/s", width, 180));
  if (returns) charts.append(timeChart(history.map(([time, , value]) => [time, value]), "mean return", "", width, 180));
  card.append(charts);
  for (const model of group.models) card.append(modelView(model));
  return card;
}

// ---- Members

const COLUMNS = [
  ["name", "Name", label],
  ["state", "State", (m) => m.state],
  ["role", "Role", (m) => m.role],
  ["groups", "Groups", (m) => m.groups.join(", ")],
  ["host", "Process", (m) => m.host + (m.pid ? ":" + m.pid : "")],
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
const TEXT = new Set(["name", "state", "role", "groups", "host"]);
const ORDER = { up: 1, new: 1, left: 2 };  // members with a problem come first, those that have left last
const bodies = new Map();

function noteOf(member) {
  return member.why || Object.entries(member.own).map(([name, value]) => `${name} ${number(value)}`).join(", ");
}

function header() {
  for (const [key, label] of COLUMNS) {
    const cell = make("th", `${key} ${TEXT.has(key) ? "" : "number"}`, label);
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

// A member's row, and the row of its note below it.
function newBody({ name, group }) {
  const body = make("tbody"), row = make("tr", "member"), note = make("tr", "note-row");
  for (const [key] of COLUMNS) row.append(make("td", `${key} ${TEXT.has(key) ? "" : "number"}`));
  const cell = make("td", "why");
  cell.colSpan = COLUMNS.length;
  note.append(cell);
  body.append(row, note);
  row.tabIndex = 0;
  row.title = "Click to see how it reaches the broker, and why so";
  const broker = { name: job.broker.name, group: "" };
  row.addEventListener("click", (event) => explain({ name, group }, broker, event.clientX, event.clientY));
  row.addEventListener("keydown", (event) => {
    const box = row.getBoundingClientRect();
    if (event.key === "Enter") explain({ name, group }, broker, box.left + 20, box.bottom);
  });
  return body;
}

function compare(a, b) {
  const [, , read] = COLUMNS.find(([key]) => key === sorted.key);
  const x = read(a) ?? -Infinity, y = read(b) ?? -Infinity;
  const order = typeof x === "string" ? x.localeCompare(String(y), undefined, { numeric: true }) : x - y;
  return sorted.down ? -order : order;
}

// Columns that tell nothing, as no member has a value, or all are in one group.
function unneeded() {
  const empty = ([, , read]) => job.members.every((member) => !read(member));
  return new Set(COLUMNS.filter((column) => (column[0] === "groups" ? job.groups.length < 2 : empty(column))).map(([key]) => key));
}

function showMembers() {
  if (!job) return;
  const wanted = byId("filter").value.toLowerCase();
  const shown = job.members.filter((m) => !wanted || `${label(m)} ${m.host} ${m.state} ${m.role} ${m.groups}`.toLowerCase().includes(wanted));
  const rank = (member) => ORDER[member.state] || 0;
  shown.sort((a, b) => rank(a) - rank(b) || compare(a, b));
  const hidden = unneeded();
  [...byId("columns").children].forEach((cell, i) => {
    const here = COLUMNS[i][0] === sorted.key;
    cell.ariaSort = here ? (sorted.down ? "descending" : "ascending") : "none";
    cell.hidden = hidden.has(COLUMNS[i][0]);
  });
  const table = byId("members");
  const keys = new Set(shown.map((m) => keyOf(m.group, m.name)));
  for (const [key, body] of bodies) {
    if (!keys.has(key)) { body.remove(); bodies.delete(key); }
  }
  shown.forEach((member, i) => {
    const of = keyOf(member.group, member.name);
    let body = bodies.get(of);
    if (!body) bodies.set(of, (body = newBody(member)));
    body.className = member.state;
    const [row, note] = body.children;
    COLUMNS.forEach(([key, , read, show], column) => {
      const value = read(member), cell = row.children[column];
      setText(cell, show ? show(value, member) : String(value));
      cell.hidden = hidden.has(key);
      if (TEXT.has(key)) cell.title = cell.textContent;
    });
    setText(note.firstChild, noteOf(member));
    note.hidden = !note.firstChild.textContent;
    if (table.tBodies[i] !== body) table.insertBefore(body, table.tBodies[i] || null);
  });
  const counts = ["left", "gone"].map((state) => [state, job.members.filter((m) => m.state === state).length]);
  const there = job.members.length - counts.reduce((sum, [, count]) => sum + count, 0);
  setText(byId("count"), [there, ...counts.filter(([, count]) => count).map(([state, count]) => `${count} ${state}`)].join(", "));
}

// ---- Paths

const KINDS = { shm: "shared memory", verbs: "RDMA", tcp: "TCP" };
let folded = null;  // whether the user has closed the picture; null: not touched

function showPaths() {
  const holder = byId("paths"), legend = byId("legend"), fold = byId("fold");
  const members = job.members.filter((member) => !["gone", "left"].includes(member.state));
  const counts = {};
  for (const member of members) for (const [, path] of member.paths) counts[path] = (counts[path] || 0) + 1;
  const kinds = Object.keys(counts).sort();
  const told = kinds.map((path) => KINDS[path] || path).join(", ");
  setText(byId("kinds"), !kinds.length ? "none yet" : kinds.length === 1 ? `all ${told}` : told);
  // Where all is shared memory there is nothing to look for.
  fold.open = folded === null ? kinds.some((path) => path !== "shm") : !folded;
  if (!fold.open) return;
  if (members.length > MOST_IN_PICTURE) {
    holder.replaceChildren();
    const parts = Object.entries(counts).map(([path, count]) => `${path}: ${count}`);
    legend.textContent = `Too many members for a picture. Connections by path: ${parts.join(", ") || "none"}. Click a member to see its path to the broker.`;
    return;
  }
  const all = [...members, { name: job.broker.name, group: "" }];
  const place = new Map(all.map((one, i) => {
    const angle = (i / all.length) * 2 * Math.PI - Math.PI / 2;
    return [keyOf(one.group, one.name), { ...one, at: [320 + 190 * Math.cos(angle), 230 + 190 * Math.sin(angle)] }];
  }));
  const svg = draw("svg", { viewBox: "0 0 640 460", role: "img", "aria-label": "paths between members" });
  const drawn = new Set();
  for (const member of members) {
    const here = keyOf(member.group, member.name);
    for (const [name, path, seconds, group] of member.paths) {
      // A holder of a group's key reports all its peers with that group.
      const there = [keyOf(group, name), keyOf("", name)].find((key) => place.has(key));
      const pair = [here, there].sort().join("\0");
      if (there === undefined || drawn.has(pair)) continue;
      drawn.add(pair);
      const [x1, y1] = place.get(here).at, [x2, y2] = place.get(there).at;
      const line = title(draw("line", { x1, y1, x2, y2, class: path }), `${label(member)} – ${label(place.get(there))}: ${path}, ${latency(seconds)}. Click to see why.`);
      line.addEventListener("click", (event) => explain(member, place.get(there), event.clientX, event.clientY));
      svg.append(line);
    }
  }
  for (const one of place.values()) {
    const [x, y] = one.at, name = label(one);
    svg.append(draw("circle", { cx: x, cy: y, r: 6, class: one.state || "" }));
    const anchor = x < 300 ? "end" : x > 340 ? "start" : "middle";
    const text = draw("text", { x: x + (anchor === "end" ? -10 : anchor === "start" ? 10 : 0), y: y + (anchor === "middle" ? (y < 230 ? -12 : 22) : 4), "text-anchor": anchor });
    text.textContent = name.length > 20 ? name.slice(0, 19) + "…" : name;
    svg.append(text);
  }
  holder.replaceChildren(svg);
  legend.textContent = "Green: shared memory. Blue: RDMA. Amber: TCP. Click a line to see why this path is used.";
}

// The box opens where the user has clicked. `member` and `peer` have a name and a group.
async function explain(member, peer, x, y) {
  const box = byId("explained"), text = byId("explanation");
  const say = (...lines) => {
    text.replaceChildren(make("b", "", `${label(member)} – ${label(peer)}`), ...lines);
    box.hidden = false;
    box.style.left = `${Math.max(8, Math.min(x + 8, innerWidth - box.offsetWidth - 8))}px`;
    box.style.top = `${Math.max(8, Math.min(y + 8, innerHeight - box.offsetHeight - 8))}px`;
  };
  const gone = job.members.find((one) => keyOf(one.group, one.name) === keyOf(member.group, member.name) && ["gone", "left"].includes(one.state));
  if (gone) { say(make("div", "", gone.why || "it has left the job")); return; }
  say(make("div", "dim", "asking …"));
  const query = new URLSearchParams({ member: member.name, group: member.group, peer: peer.name, peer_group: peer.group });
  let told;
  try {
    told = await (await fetch("api/v1/explain?" + query)).json();
  } catch (failed) {
    told = { error: String(failed) };
  }
  if (told.error) { say(make("div", "", told.error)); return; }
  const paths = told.paths.map((path) => make("div", "dim", `${path.path}: ${path.state}` + (path.reason ? `, ${path.reason}` : "")));
  say(make("div", "", told.reason), ...paths);
}

function closesExplanation() {
  const box = byId("explained");
  byId("close").addEventListener("click", () => { box.hidden = true; });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") box.hidden = true; });
  document.addEventListener("pointerdown", (event) => { if (!box.contains(event.target)) box.hidden = true; });
}

// ---- Events

function showEvents() {
  const items = job.events.slice(-MOST_EVENTS).reverse().map((event) => {
    const place = event.groups.join(", ") || "the broker";
    const verb = { joined: "joined", left: "left", gone: "has gone from" }[event.kind] || (event.kind === "recovered" ? "has recovered in" : `is ${event.kind} in`);
    const text = `${clock(event.time)}  ${label({ name: event.member, group: event.group })} ${verb} ${place}`;
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
  return element.querySelector("#paths line:hover, .chart:hover") !== null || (!selection.isCollapsed && element.contains(selection.anchorNode));
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
closesExplanation();
byId("fold").querySelector("summary").addEventListener("click", () => { folded = byId("fold").open; if (job) setTimeout(showPaths); });
window.addEventListener("resize", () => job && show());
byId("filter").addEventListener("input", showMembers);
document.addEventListener("visibilitychange", () => job && !document.hidden && show());
follow();
