// Shows one request's life: a bar of its phases with marks for decisions, and a table of its events.

import { $, compared, counted, element, leftOut, notice, number, outcome, setText, short, table, words } from "./rows.js";

const PHASES = { PHASE_PROMPT: "prompt", PHASE_THINK: "think", PHASE_OUTPUT: "output" };
const DOES = { prompt: "reading the prompt", think: "thinking", output: "answering" };
let wanted = null;
let shown = null;
let asking = false;

export function follow() {
  const hash = new URLSearchParams(location.hash.slice(1));
  const id = hash.get("request");
  if (!id) return;
  wanted = { id, engine: hash.get("engine") || "" };
  shown = null;
  $("request-id").value = id;
  $("request-heading").focus();
  ask();
}

// Asks for the request's life again, as long as the request lives.
export function lookAgain() {
  if (wanted && !asking && (!shown || !shown.close_time)) ask();
}

async function ask() {
  const mine = wanted;
  const query = new URLSearchParams({ id: mine.id, engine: mine.engine });
  let answer;
  asking = true;
  try {
    answer = await (await fetch(`request?${query}`)).json();
  } catch (error) {
    answer = { error: `The control plane did not answer: ${error.message}` };
  }
  asking = false;
  if (mine !== wanted) return;
  if (answer.error) wanted = null;
  notice("life-error", answer.error || "");
  $("life").hidden = Boolean(answer.error);
  if (!answer.error) show(answer.life);
}

function show(life) {
  shown = life;
  const begin = new Date(life.open_time).getTime();
  const end = new Date(life.close_time || Date.now()).getTime();
  setText("life-heading", `${life.request_id} on ${life.engine_id}`);
  const facts = [life.tenant && `tenant ${life.tenant}`, life.slo_class && `class ${life.slo_class}`,
    life.effort && `effort ${life.effort}`, life.joined_late && "beginning not observed"];
  setText("life-about", [life.close_time ? "Finished" : "Live", counted(life.prompt_tokens, "prompt token"),
    ...facts.filter(Boolean)].join(", "));
  drawBar(spans(life, begin, end), life, begin, end);
  table("life-events", life.events, (e) => life.events.indexOf(e), (e) => eventCells(e, begin), "No event is known.");
  leftOut("life-more", +life.events_left_out, "earlier event");
}

// Returns the request's stretches of one phase, in order, as {phase, preempted, begin, end}; times are in ms.
function spans(life, begin, end) {
  const found = [];
  let phase = "prompt", preempted = false, since = begin;
  const until = (at) => {
    const last = found[found.length - 1];
    if (last && last.phase === phase && last.preempted === preempted) last.end = at;
    else if (at > since) found.push({ phase, preempted, begin: since, end: at });
    since = at;
  };
  life.events.filter((e) => !e.decision).forEach((e) => {
    const now = e.kind === "closed" ? phase : PHASES[e.phase] || phase;
    const out = e.kind === "preempted" || (preempted && e.kind !== "resumed");
    if (now === phase && out === preempted) return;
    until(new Date(e.time).getTime());
    [phase, preempted] = [now, out];
  });
  until(end);
  return found;
}

// Returns the kind of mark that an event gets on the bar; empty for events without a mark.
function marked(e) {
  if (e.kind === "think_end" && e.detail !== "natural") return "force";
  return e.decision && e.decision.kind === "probe" ? "probe" : "";
}

function drawBar(parts, life, begin, end) {
  const length = Math.max(1, end - begin);
  const place = (at) => `${(100 * (new Date(at).getTime() - begin)) / length}%`;
  const drawn = parts.map((span) => {
    const part = element("span", `span ${span.phase}${span.preempted ? " preempted" : ""}`);
    part.style.width = `${(100 * (span.end - span.begin)) / length}%`;
    return part;
  });
  const marks = life.events.filter(marked).map((e) => {
    const mark = element("span", `mark ${marked(e)}`);
    mark.style.left = place(e.time);
    return mark;
  });
  const told = parts.map((span) => `${DOES[span.phase]}${span.preempted ? ", preempted" : ""} ` +
    `${((span.end - span.begin) / 1000).toFixed(2)} s`);
  $("life-bar").replaceChildren(...drawn, ...marks);
  $("life-bar").setAttribute("aria-label", `Phases: ${told.join(", ")}`);
  const tokens = { think: life.think_tokens, output: life.output_tokens };
  const entries = parts.map((span, i) => element("li", span.phase, element("span", `swatch ${span.phase}`), told[i]));
  for (const [phase, count] of Object.entries(tokens)) {
    const last = parts.map((span) => span.phase).lastIndexOf(phase);
    if (last >= 0) entries[last].append(` (${counted(count, "token")})`);
  }
  for (const [kind, text] of [["force", "thinking ended by force"], ["probe", "EAT probe"]]) {
    if (life.events.some((e) => marked(e) === kind)) {
      entries.push(element("li", "", element("span", `swatch ${kind}`), text));
    }
  }
  $("life-spans").replaceChildren(...entries);
}

function eventCells(e, begin) {
  const after = `${((new Date(e.time).getTime() - begin) / 1000).toFixed(3)} s`;
  const tokens = [[number.format(e.think_tokens), "num"], [number.format(e.output_tokens), "num"]];
  const d = e.decision;
  if (!d) return [[after, "num"], [what(e), PHASES[e.phase] || ""], ...tokens, "", ""];
  const measured = d.measured_eat_nats === undefined ? "" : `EAT ${short(d.measured_eat_nats)} nats`;
  const kind = d.kind === "force" && !d.shadow ? "strong" : "";
  return [[after, "num"], [`${d.kind}: ${words(d.reason)}`, kind], ...tokens, outcome(d), compared(d, true, measured)];
}

function what(e) {
  if (e.kind === "phase") return DOES[PHASES[e.phase]] || "phase unknown";
  return e.detail ? `${words(e.kind)}: ${words(e.detail)}` : words(e.kind);
}
