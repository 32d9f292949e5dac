// Shows the page's contents, which `contents.py` collects and /events sends once a second.

import { keepHistory } from "./history.js";
import { follow, lookAgain } from "./life.js";
import { isActive, showRollouts } from "./rollout.js";
import {
  $, clock, compared, counted, date, element, leftOut, notice, number, outcome, requestLink, setText, table, words,
} from "./rows.js";

const PHASES = [["prompt", "Reading the prompt"], ["think", "Thinking"], ["output", "Answering"]];

const byCount = (map) => Object.entries(map).sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1))
  .map(([name, count]) => `${words(name)} ${number.format(count)}`).join(", ");

function show(state) {
  showSummary(state);
  showTotals(state.totals);
  showEngines(state);
  showFreezes(state.freezes);
  showBudgets(state.budgets || []);
  showCapabilities(state.capabilities);
  if (state.rollouts) showRollouts(state.rollouts);
  showEnds(state.ends);
  showSavings(state.savings || []);
  showRequests(state);
  if (state.revisions) showRevisions(state.revisions);
  setText("about", `meridian-control ${state.version}, replica ${state.replica}`);
  lookAgain();
}

function showSummary(state) {
  const t = state.totals;
  const candidate = (state.rollouts || []).filter(isActive).map((r) => `, ${r.candidate_revision} in a rollout`);
  // Screen readers read the summary aloud whenever it changes, so it has no numbers that change all the time.
  setText("summary", `${counted(t.engines, "engine")} connected, ` +
    (t.engines || t.troubled ? `${t.troubled ? number.format(t.troubled) : "none"} in trouble, ` : "") +
    `policy revision ${state.revision || "none"}${candidate.join("")}`);
  const missing = state.unreachable.length
    ? `No answer from replica ${state.unreachable.join(", ")}. This page lacks the engines there.` : "";
  notice("access", state.access);
  const harm = (state.harm || []).map((sentence) => sentence[0].toUpperCase() + sentence.slice(1));
  notice("notice", [...harm, state.withdrawn, missing, state.store_trouble].filter(Boolean).join(" "));
}

function tile(name, value, kind, more) {
  const dd = element("dd", kind, number.format(value));
  const parts = [element("dt", "", name), dd];
  if (more) parts.push(element("dd", "small", more));
  return element("div", "", ...parts);
}

function showTotals(t) {
  const tiles = PHASES.map(([phase, name]) => {
    const p = t.phases[phase];
    const others = [p.new && `${number.format(p.new)} new`, p.preempted && `${number.format(p.preempted)} preempted`];
    const more = `${number.format(p.generating)} running${others.filter(Boolean).map((o) => `, ${o}`).join("")}`;
    return tile(name, p.new + p.generating + p.preempted, phase, more);
  });
  tiles.push(tile("Waiting in vLLM", t.waiting, "", "not in the running batch"));
  tiles.push(tile("Engines gone", t.gone, t.gone ? "warn" : "", "in the last 10 minutes"));
  tiles.push(tile("Answers preempted", t.output_critical, t.output_critical ? "bad" : "", "the target is 0"));
  tiles.forEach((made, i) => {
    const old = $("totals").children[i];
    if (!old) $("totals").append(made);
    else if (!old.isEqualNode(made)) old.replaceWith(made);
  });
  setText("ended", byCount(t.ended) || "none");
}

function condition(e) {
  const cause = e.cause ? [element("span", "cause", e.cause)] : [];
  return element("div", "state", element("span", e.level || "good", e.word), ...cause);
}

function showEngines(state) {
  const replicas = new Set(state.engines.map((e) => e.replica));
  $("engines").classList.toggle("one-replica", replicas.size < 2);
  $("engines").classList.toggle("no-pools", !state.engines.some((e) => e.handovers));
  table("engines", state.engines, (e) => `${e.id} ${e.incarnation}`, (e) => [
    e.id, condition(e), e.model,
    e.acked_revision === e.revision ? String(e.revision) : [`${e.acked_revision}, wanted ${e.revision}`, "warn"],
    [number.format(e.thinking), "num think"], [number.format(e.answering), "num output"],
    [number.format(e.waiting), "num"], [`${Math.round(e.kv_used * 100)} %`, "num"],
    [e.step_time_ms ? e.step_time_ms.toFixed(1) : "", "num"], [byCount(e.ends), "wrap"], e.replica,
    [e.handovers, "wrap"],
  ], "No engine has connected.");
  leftOut("engines-more", state.engines_left_out, "engine");
}

function showFreezes(freezes) {
  table("freezes", freezes, (f) => f.freeze_id, (f) => [
    [f.freeze_id, "num"], [f.match, "wrap"], f.left,
    [`${f.confirmed} of ${counted(f.engines, "engine")}`, f.confirmed < f.engines ? "warn" : ""], f.author,
    [f.reason, "wrap"],
  ], "No freeze is in force.");
}

function showBudgets(budgets) {
  table("budgets", budgets, (b) => b.name, (b) => [
    b.name, [b.requests, "wrap"], [b.stage, b.level], [b.left, "num"],
    [b.tokens_per_minute ? number.format(b.tokens_per_minute) : "", "num"],
    [b.tokens_per_day ? number.format(b.tokens_per_day) : "", "num"], [number.format(b.used_tokens), "num"],
  ], "The policy has no budget.");
}

function showCapabilities(rows) {
  $("capabilities-section").hidden = !rows.length;
  table("capabilities", rows, ([name, row]) => `${name} ${row}`, ([name, row, text]) => [name, row, [text, "wrap"]], "");
}

function showEnds(ends) {
  table("forces", ends, (d) => `${d.session_id} ${d.decision_id}`, (d) => [
    clock(d.time), d.engine_id, requestLink(d.request_id, d.engine_id), words(d.reason),
    [number.format(d.outcome_think_tokens || d.signals.think_tokens), "num"],
    [outcome(d), d.outcome === "OUTCOME_REFUSED" ? "bad" : ""], compared(d, false),
  ], "No end of thinking has been decided.");
}

const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
const mean = (sum, count) => (+count ? [(sum / count).toFixed(1), "num"] : ["", "num"]);
const share = (part, whole) => (+whole ? [percent(part / whole), "num"] : ["", "num"]);

function saving(s) {
  const r = s.saved_ratio;
  return r ? `${percent(r.value)} (${percent(r.low)} to ${percent(r.high)})` : "too few requests";
}

function spilled(s, arm) {
  const side = arm === "treated" ? s.forced_ends : s.natural_ends, r = s.spills;
  if (!side || !r) return "too few ends";
  const found = percent((+side.reentries + +side.long_answers) / +side.ends);
  return arm === "control" ? found : `${found}, difference ${percent(r.low)} to ${percent(r.high)}`;
}

function showSavings(savings) {
  const rows = savings.flatMap((s) => ["treated", "control"].map((arm) => ({ s, arm, counts: s[arm] })));
  table("savings", rows, (r) => `${r.s.rules} ${r.arm}`, ({ s, arm, counts: c }) => [
    [s.since_revision, "num"], arm, [number.format(c.requests), "num"], mean(c.think_tokens, c.requests),
    mean(c.answer_tokens, c.answers), share(c.stopped, c.requests), share(c.reentries, c.requests),
    share(c.aborts, c.requests), share(c.lengths, c.requests), arm === "treated" ? saving(s) : "",
    arm === "control" ? [s.harm, "wrap"] : "", arm === "control" ? [s.drift, "wrap"] : "", spilled(s, arm),
  ], "Nothing in force shortens thinking.");
  const kinds = savings.flatMap((s) => s.kinds.map((k) => ({ s, k })));
  table("harm", kinds, (r) => `${r.s.rules} ${r.k.text}`, ({ s, k }) => [
    [s.since_revision, "num"], [k.text, k.level], [number.format(k.judged), "num"],
    [number.format(k.judged_stops), "num"], [number.format(k.harmful), "num"], [number.format(k.unjudged), "num"],
    [k.harm, "wrap"], [ended(k.forced_ends), "wrap"], [ended(k.natural_ends), "wrap"],
  ], "Nothing in force shortens thinking.");
}

function ended(ends) {
  const n = Number((ends || {}).ends || 0);
  if (!n) return "none";
  const parts = [["empty_answers", "empty"], ["reentries", "thought again"], ["lengths", "by length"]];
  return `${number.format(n)}: ${parts.map(([field, name]) => `${percent(+ends[field] / n)} ${name}`).join(", ")}`;
}

function showRequests(state) {
  table("requests", state.requests, (r) => `${r.engine} ${r.id}`, (r) => [
    requestLink(r.id, r.engine), r.engine, r.tenant,
    [r.preempted ? `${r.phase}, preempted` : r.phase, r.phase], [number.format(r.think_tokens), "num"],
    [number.format(r.output_tokens), "num"], [r.eat_ema_nats === null ? "" : r.eat_ema_nats, "num"],
    words(r.last_decision),
  ], "No request is live.");
  leftOut("requests-more", state.requests_left_out, "request");
}

function showRevisions(revisions) {
  table("revisions", revisions, (r) => r.revision, (r) => [
    [r.revision, "num"], r.engines ? counted(r.engines, "engine") : "", date(r.create_time), r.author,
    [r.reason, "wrap"],
  ], "No policy is stored.");
}

// ------------------------------------------------------------------------------------------------------- stream

let paused = false;
let newest = null;
let heard = null;

// Numbers that nobody vouches for are worse than none, so the page hides them while the control plane is gone.
function connected(is) {
  document.body.classList.toggle("live", is && !paused);
  setText("connection-text", paused ? "paused" : is ? "live" : "connection lost, trying again");
  if (paused) return;
  document.querySelector("main").hidden = !is;
  if (is) return notice("gone", "");
  const last = heard ? ` The page heard from it last at ${clock(heard)}.` : "";
  setText("summary", "The control plane does not answer");
  notice("gone", `The control plane does not answer, so nothing is shown.${last} Engines keep serving without it.`);
}

const events = new EventSource("events");
events.onopen = () => connected(true);
events.onerror = () => connected(false);
events.onmessage = (event) => {
  newest = JSON.parse(event.data);
  heard = Date.now();
  if (!paused) show(newest);
};
events.addEventListener("trouble", (event) => notice("notice", JSON.parse(event.data)));

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  const open = events.readyState === EventSource.OPEN;
  connected(open);
  if (!paused && open && newest) show(newest);
});
window.addEventListener("hashchange", follow);
$("lookup").addEventListener("submit", (event) => {
  event.preventDefault();
  const hash = `#request=${encodeURIComponent($("request-id").value.trim())}`;
  if (location.hash === hash) follow();
  else location.hash = hash;
});
follow();
keepHistory();
