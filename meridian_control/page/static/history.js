// Draws the last hour as line charts: SVG without a library, because each is two lines, an axis and some marks.

import { $, answerTo, clock, counted, element, number, setChildren, setText } from "./rows.js";

const WIDTH = 400, HEIGHT = 110, SHORTEST_S = 300;
// Each chart has a title, a unit, and lines: the field of a point, the kind of line, and its name.
const CHARTS = [
  ["Live requests", "", [["thinking", "think", "thinking"], ["answering", "output", "answering"]]],
  ["Tokens", "/s", [["think_tokens_per_s", "think", "thinking"], ["answer_tokens_per_s", "output", "answering"]]],
  ["Thinking tokens saved", "/s", [["saved_tokens_per_s", "think", "by all shortening"]]],
  ["Thinking saved", "%", [["saved_ratio", "think", "against the control group"]]],
  ["Harm", "%", [["harm_ratio", "plain", "measured"], ["harm_high", "bound", "at most"],
    ["harm_allowed", "limit", "allowed"]]],
  ["Latency, P99", "ms", [["ttot_p99_ms", "plain", "first token"], ["itl_p99_ms", "bound", "gaps"]]],
  ["Ends of thinking", "/min", [["natural_per_min", "plain", "natural"], ["forced_per_min", "bound", "by a rule or cap"]]],
  ["Agent, share of a core", "%", [["agent_share", "plain", "mean of the engines"]]],
];
const SHARES = new Set(["saved_ratio", "harm_ratio", "harm_high", "harm_allowed", "agent_share"]);

let points = [];
// Index of the point whose values are shown; null for the newest.
let chosen = null;

function svg(tag, attributes, ...children) {
  // The page has an SVG element, whose namespace is that of all SVG elements.
  const made = document.createElementNS($("history-shape").namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function value(point, name) {
  const found = point[name] ?? null;
  return found === null ? null : found * (SHARES.has(name) ? 100 : 1);
}

const begin = () => Math.min(points[0].time, points[points.length - 1].time - SHORTEST_S);
const place = (p) => WIDTH * (p.time - begin()) / (points[points.length - 1].time - begin());

// Returns the stretches of a line without the places where the value is not known.
function paths(name, y) {
  const found = [[]];
  for (const p of points) {
    if (value(p, name) === null) found.push([]);
    else found[found.length - 1].push(`${place(p).toFixed(1)},${y(value(p, name)).toFixed(1)}`);
  }
  return found.filter((part) => part.length).map((part) => (part.length > 1 ? part.join(" ") : `${part[0]} ${part[0]}`));
}

// Returns the revisions and freezes as {begin, end, kind, text}, where begin and end are points.
function events() {
  const found = [];
  let freeze = null;
  points.forEach((p, i) => {
    const before = points[i - 1];
    if (before && p.revision !== before.revision) {
      found.push({ begin: p, end: p, kind: "revision", text: `policy revision ${p.revision} at ${clock(p.time * 1000)}` });
    }
    if (!p.frozen) freeze = null;
    else if (freeze) freeze.end = p;
    else found.push(freeze = { begin: before || p, end: p, kind: "frozen", most: 0 });
    if (freeze) {
      freeze.most = Math.max(freeze.most, p.frozen);
      freeze.text = `${counted(freeze.most, "engine")} frozen from ${clock(freeze.begin.time * 1000)} to ${clock(p.time * 1000)}`;
    }
  });
  return found;
}

const mark = ({ begin: from, end, kind, text }) => (kind === "frozen"
  ? svg("rect", { x: place(from), width: Math.max(1, place(end) - place(from)), y: 0, height: HEIGHT, class: "frozen" },
    svg("title", {}, text))
  : svg("line", { x1: place(from), x2: place(from), y1: 0, y2: HEIGHT, class: "revision" }, svg("title", {}, text)));

// The bound of harm begins at 100 %, so the scale follows from what is allowed and from the newest bound.
function scaled(title, known) {
  if (title !== "Harm") return ceiling(Math.max(0, ...known));
  const newest = points[points.length - 1];
  return ceiling(Math.max(2 * value(newest, "harm_allowed"), value(newest, "harm_high"), value(newest, "harm_ratio")));
}

// Returns a round number that is at least the value, so that the scale stays while values change a little.
function ceiling(most) {
  if (!(most > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].find((step) => step * power >= most * 0.999) * power;
}

function told(amount, unit) {
  if (amount === null) return "not known";
  const rounded = +amount.toPrecision(3);
  return `${Math.abs(rounded) >= 1000 ? number.format(rounded) : rounded}${unit && ` ${unit}`}`;
}

function chart([title, unit, lines], marks) {
  const known = points.flatMap((p) => lines.map(([name]) => value(p, name))).filter((v) => v !== null);
  const top = scaled(title, known);
  const y = (v) => HEIGHT - 1.5 - (HEIGHT - 5) * Math.min(1, Math.max(0, v / top));
  const at = points[chosen ?? points.length - 1];
  const drawn = lines.flatMap(([name, kind]) => paths(name, y)
    .map((part) => svg("polyline", { points: part, class: `line ${kind}` })));
  const cursor = chosen === null ? [] : [svg("line", { x1: place(at), x2: place(at), y1: 0, y2: HEIGHT, class: "cursor" })];
  const legend = lines.map(([name, kind, label]) => element("span", kind, element("i", `key ${kind}`), label, " ",
    element("b", "", told(value(at, name), unit))));
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", preserveAspectRatio: "none",
    "aria-label": `${title}: ${legend.map((part) => part.textContent).join(", ")}; ` +
      (known.length ? `at most ${told(Math.max(...known), unit)} in this time` : "no value in this time") },
  svg("line", { x1: 0, x2: WIDTH, y1: y(top), y2: y(top), class: "grid" }),
  svg("line", { x1: 0, x2: WIDTH, y1: y(top / 2), y2: y(top / 2), class: "grid" }),
  ...marks.map(mark), ...drawn, ...cursor);
  const figure = element("figure", known.length ? "chart" : "chart unknown",
    element("figcaption", "", element("strong", "", title), element("span", "scale", known.length ? told(top, unit) : "")),
    picture, element("p", "axis", element("span", "", clock(begin() * 1000)), element("span", "", "now")),
    element("p", "legend", ...legend));
  return figure;
}

function show() {
  const drawable = points.length > 1;
  $("history-none").hidden = drawable;
  $("history-time").hidden = !drawable;
  if (!drawable) return;
  const marks = events();
  setChildren("history", CHARTS.map((one) => chart(one, marks)));
  const at = points[chosen ?? points.length - 1];
  $("history-at").max = points.length - 1;
  if (chosen === null) $("history-at").value = points.length - 1;
  $("history-at").setAttribute("aria-valuetext", clock(at.time * 1000));
  setText("history-clock", clock(at.time * 1000) + (chosen === null ? ", the newest" : ""));
  const texts = marks.map((one) => one.text);
  setText("history-marks", "Dotted lines are policy revisions, shaded times are freezes" +
    (texts.length ? `: ${texts.slice(-8).join("; ")}.` : "; there was none in this time."));
  const ends = {};
  points.forEach((p) => Object.entries(p.ends).forEach(([name, n]) => { ends[name] = (ends[name] || 0) + n; }));
  const listed = Object.entries(ends).sort((a, b) => b[1] - a[1]).map(([name, n]) => `${name} ${number.format(n)}`);
  setText("history-ends", listed.join(", ") || "none");
}

function choose(index) {
  chosen = index >= points.length - 1 ? null : index;
  show();
}

$("history-at").addEventListener("input", () => choose(+$("history-at").value));
// The pointer chooses a time on any chart.
$("history").addEventListener("pointermove", (event) => {
  const picture = event.target.closest && event.target.closest("svg");
  if (!picture || points.length < 2) return;
  const box = picture.getBoundingClientRect(), x = WIDTH * (event.clientX - box.left) / box.width;
  const distances = points.map((p) => Math.abs(place(p) - x));
  const nearest = distances.indexOf(Math.min(...distances));
  if (nearest !== (chosen ?? points.length - 1)) choose(nearest);
});
$("history").addEventListener("pointerleave", () => choose(points.length));

export async function keepHistory() {
  try {
    if (!document.hidden && !$("overview").hidden) {
      const newest = await answerTo("history");
      // The chosen time stays while older points leave.
      const time = chosen === null ? null : points[chosen].time;
      points = newest;
      const index = points.findIndex((p) => p.time === time);
      chosen = index < 0 ? null : index;
      show();
    }
  } catch {
    // The stream of events says that the control plane does not answer.
  }
}
