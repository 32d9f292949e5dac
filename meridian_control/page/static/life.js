// Shows one request's life: a bar of its phases with marks for decisions, and a table of its events.

import { $, answerTo, counted, element, fillRows, notice, num, reasons, setText } from "./rows.js";
import { fold, setHead } from "./tables.js";
import { place } from "./views.js";

const PHASES = { PHASE_PROMPT: "prompt", PHASE_THINK: "think", PHASE_OUTPUT: "output" };
const DOES = { prompt: "reading the prompt", think: "thinking", output: "answering" };
const STATES = { finished: "Finished", live: "Live", lost: "End unknown, because the stream is lost" };
const HEAD = [["Time", "num"], ["Thinking", "num"], ["Answer", "num"], ["Event"], ["Compared by the rule"], ["Outcome"]];
let wanted = null;
let over = false;
let asking = false;

// Shows the request that the address names; asks for one that is shown already only if `again` says so.
export function follow(again = false) {
  const { query } = place();
  const id = query.get("id"), engine = query.get("engine") || "";
  if (!again && wanted && wanted.id === id && wanted.engine === engine) return;
  wanted = id ? { id, engine } : null;
  over = false;
  if (!id) {
    $("life").hidden = true;
    return notice("life-error", "");
  }
  $("request-id").value = id;
  $("request-heading").focus();
  ask();
}

// Asks for the request's life again until the request has finished or is not known; a lost stream may come back.
export function lookAgain() {
  if (wanted && !asking && !over) ask();
}

async function ask() {
  const mine = wanted;
  let answer;
  asking = true;
  try {
    answer = await answerTo(`request?${new URLSearchParams(mine)}`);
  } catch (error) {
    answer = { error: `The control plane did not answer: ${error.message}`, again: true };
  }
  if (mine !== wanted) return;
  asking = false;
  over = answer.error ? !answer.again : Boolean(answer.life.close_time);
  notice("life-error", answer.error ? `${answer.error[0].toUpperCase()}${answer.error.slice(1)}.` : "");
  $("life").hidden = Boolean(answer.error);
  if (!answer.error) show(answer.life, answer.now);
}

function show(life, now) {
  const begin = new Date(life.open_time).getTime();
  // The browser's clock may differ from the control plane's.
  const end = new Date(life.close_time || (life.state === "lost" ? life.events.at(-1)?.time || begin : now)).getTime();
  setText("life-heading", `${life.request_id} on ${life.engine_id}`);
  const facts = [life.tenant && `tenant ${life.tenant}`, life.slo_class && `class ${life.slo_class}`,
    life.effort && `effort ${life.effort}`, life.joined_late && "beginning not observed"];
  setText("life-about", [STATES[life.state], counted(life.prompt_tokens, "prompt token"),
    ...facts.filter(Boolean)].join(", "));
  drawBar(spans(life, begin, end), life, begin, end);
  setHead($("life-table"), HEAD);
  fillRows($("life-table"), life.events, (_, i) => i, (e) => [
    [`${((new Date(e.time).getTime() - begin) / 1000).toFixed(3)} s`, "num"], num(e.think_tokens), num(e.output_tokens),
    [e.text, `wrap ${e.mark === "force" ? "strong" : e.kind === "phase" ? PHASES[e.phase] || "" : ""}`], reasons(e.why),
    e.outcome,
  ]);
  fold($("life-table"), life.events.length ? "" : "No event is known.");
  const left = +life.events_left_out;
  notice("life-more", left ? `${counted(left, "earlier event")} no longer known.` : "");
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
  life.events.filter((e) => e.kind !== "decision").forEach((e) => {
    const now = e.kind === "closed" ? phase : PHASES[e.phase] || phase;
    const out = e.kind === "preempted" || (preempted && e.kind !== "resumed");
    if (now === phase && out === preempted) return;
    until(new Date(e.time).getTime());
    [phase, preempted] = [now, out];
  });
  until(end);
  return found;
}

function drawBar(parts, life, begin, end) {
  const length = Math.max(1, end - begin);
  const drawn = parts.map((span) => {
    const part = element("span", `span ${span.phase}${span.preempted ? " preempted" : ""}`);
    part.style.width = `${(100 * (span.end - span.begin)) / length}%`;
    return part;
  });
  const marks = life.events.filter((e) => e.mark).map((e) => {
    const mark = element("span", `mark ${e.mark}`);
    mark.style.left = `${(100 * (new Date(e.time).getTime() - begin)) / length}%`;
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
  for (const [kind, text] of [["force", "thinking ended by a rule or a cap"], ["probe", "probe"]]) {
    if (life.events.some((e) => e.mark === kind)) {
      entries.push(element("li", "", element("span", `swatch ${kind}`), text));
    }
  }
  $("life-spans").replaceChildren(...entries);
}
