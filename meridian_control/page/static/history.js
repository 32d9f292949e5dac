// Draws the last hour as line charts: SVG without a library, because each is two lines, an axis and some marks.

import { $, clock, element, number, short, words } from "./rows.js";

const WIDTH = 400, HEIGHT = 110, HOUR_S = 3600, ASK_MS = 15000;
const CHARTS = [
  ["Live requests", "", [["thinking", "think", "thinking"], ["answering", "output", "answering"]]],
  ["Tokens per second", "", [["tokens_per_s", "plain", "generated"]]],
  ["Delays of answers, P99", "ms", [["ttot_p99_ms", "think", "thinking to answer"], ["itl_p99_ms", "output", "gap"]]],
  ["Agent, of a thread", "%", [["agent_share", "plain", "mean of the engines"]]],
];

function svg(tag, attributes, ...children) {
  // The page has an SVG element, whose namespace is that of all SVG elements.
  const made = document.createElementNS($("history-shape").namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const value = (point, name) => (point[name] === null ? null : point[name] * (name === "agent_share" ? 100 : 1));

// Returns the stretches of a line without the places where the value is not known.
function paths(points, name, x, y) {
  const found = [[]];
  for (const p of points) {
    if (value(p, name) === null) found.push([]);
    else found[found.length - 1].push(`${x(p).toFixed(1)},${y(value(p, name)).toFixed(1)}`);
  }
  return found.filter((part) => part.length).map((part) => (part.length > 1 ? part.join(" ") : `${part[0]} ${part[0]}`));
}

function marks(points, x) {
  const drawn = [];
  points.forEach((p, i) => {
    const before = points[i - 1];
    if (!before) return;
    const at = { x1: x(p), x2: x(p), y1: 0, y2: HEIGHT };
    const told = `${clock(p.time * 1000)}: `;
    if (p.revision !== before.revision) {
      drawn.push(svg("line", { ...at, class: "revision" }, svg("title", {}, `${told}policy revision ${p.revision}`)));
    }
    if (p.frozen) {
      const from = x(before);
      drawn.push(svg("rect", { x: from, width: Math.max(1, x(p) - from), y: 0, height: HEIGHT, class: "frozen" },
        svg("title", {}, `${told}${p.frozen} engines frozen`)));
    }
  });
  return drawn;
}

function chart([title, unit, lines], points) {
  const end = points[points.length - 1].time;
  const x = (p) => WIDTH * (1 - (end - p.time) / HOUR_S);
  const known = points.flatMap((p) => lines.map(([name]) => value(p, name))).filter((v) => v !== null);
  const most = Math.max(1e-9, ...known);
  const y = (v) => HEIGHT - 2 - (HEIGHT - 6) * (v / most);
  const drawn = lines.flatMap(([name, kind]) => paths(points, name, x, y)
    .map((part) => svg("polyline", { points: part, class: `line ${kind}` })));
  const now = points[points.length - 1];
  const said = lines.map(([name, kind, label]) => {
    const current = value(now, name);
    const text = current === null ? "no value now" : `${short(current)}${unit && ` ${unit}`}`;
    return element("span", kind, `${label}: ${text}`);
  });
  const top = known.length ? `${short(most)}${unit && ` ${unit}`} at most` : "no value yet";
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", preserveAspectRatio: "none",
    "aria-label": `${title} in the last hour: ${said.map((s) => s.textContent).join(", ")}; ${top}` },
    ...marks(points, x), ...drawn);
  return element("figure", "chart", element("figcaption", "", element("strong", "", title), ...said), picture,
    element("p", "axis", element("span", "", "one hour ago"), element("span", "", top), element("span", "", "now")));
}

function show(points) {
  $("history-section").hidden = points.length < 2;
  if (points.length < 2) return;
  $("history").replaceChildren(...CHARTS.map((one) => chart(one, points)));
  const ends = {};
  points.forEach((p) => Object.entries(p.ends).forEach(([name, n]) => { ends[name] = (ends[name] || 0) + n; }));
  const listed = Object.entries(ends).sort((a, b) => b[1] - a[1]).map(([name, n]) => `${words(name)} ${number.format(n)}`);
  $("history-ends").textContent = listed.join(", ") || "none";
}

export async function keepHistory() {
  try {
    show(await (await fetch("history")).json());
  } catch {
    // The stream of events says that the control plane does not answer.
  }
  setTimeout(keepHistory, ASK_MS);
}
