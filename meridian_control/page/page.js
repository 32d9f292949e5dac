// The page's contents come from /events once a second; rows are changed in place, so that focus and selection stay.
"use strict";

const $ = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");
const clock = (stamp) => (stamp ? new Date(stamp).toLocaleTimeString() : "");
const date = (stamp) => (stamp ? new Date(stamp).toLocaleString() : "");
const lower = (name, prefix) => (name || "").replace(prefix, "").toLowerCase().replaceAll("_", " ");

// Cells are text, or [text, class], or a node.
function fill(row, cells) {
  cells.forEach((cell, i) => {
    const td = row.cells[i] || row.insertCell();
    if (cell instanceof Node) {
      if (td.firstChild && td.firstChild.isEqualNode(cell)) return;
      td.replaceChildren(cell);
      return;
    }
    const [text, kind] = Array.isArray(cell) ? cell : [cell, ""];
    if (td.textContent !== String(text)) td.textContent = text;
    if (td.className !== kind) td.className = kind;
  });
}

function table(id, rows, key, cells, none) {
  const body = $(id).tBodies[0];
  const known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  rows.forEach((item, i) => {
    const name = key(item);
    let row = known.get(name);
    known.delete(name);
    if (!row) {
      row = document.createElement("tr");
      row.dataset.key = name;
    }
    if (body.rows[i] !== row) body.insertBefore(row, body.rows[i] || null);
    fill(row, cells(item));
  });
  known.forEach((row) => row.remove());
  if (!rows.length) {
    const row = body.insertRow();
    row.dataset.key = "";
    const td = row.insertCell();
    td.colSpan = $(id).tHead.rows[0].cells.length;
    td.className = "empty";
    td.textContent = none;
  }
}

function more(id, count, what) {
  $(id).hidden = !count;
  $(id).textContent = count ? `${number.format(count)} more ${what} are not shown.` : "";
}

function requestLink(id, engine) {
  const link = document.createElement("a");
  link.href = `#request=${encodeURIComponent(id)}&engine=${encodeURIComponent(engine)}`;
  link.textContent = id;
  return link;
}

function engineState(e) {
  if (!e.connected) return [e.state === "UNSPECIFIED" ? "gone" : `gone, ${e.state} if it lives`, "bad"];
  if (e.fault) return [`agent off: ${e.fault}`, "bad wrap"];
  if (e.nack_error) return [`refused ${e.revision}: ${e.nack_error}`, "bad wrap"];
  return e.frozen ? ["frozen: stock vLLM", "warn"] : [e.state === "UNSPECIFIED" ? "connected" : e.state, ""];
}

function why(decision) {
  const compared = (decision.comparisons || []).map(
    (c) => `${c.signal} ${short(c.value)} ${c.operator} ${c.limit_name} ${short(c.limit)}`);
  return [compared.join("; ") || decision.detail || "", "wrap"];
}

const short = (value) => (Math.abs(value) >= 1000 || Number.isInteger(value) ? number.format(value) : String(+(+value).toPrecision(3)));

function outcome(decision) {
  const name = lower(decision.outcome, "OUTCOME_") || "open";
  return decision.shadow ? `${name} (shadow)` : name;
}

const counts = (map) => Object.entries(map).sort((a, b) => b[1] - a[1])
  .map(([name, count]) => `${name.replaceAll("_", " ")} ${number.format(count)}`).join(", ");

let said = "";
function show(state) {
  const t = state.totals;
  const summary = `${number.format(t.engines)} engine${t.engines === 1 ? "" : "s"} connected, ` +
    (t.troubled ? `${number.format(t.troubled)} in trouble, ` : "none in trouble, ") +
    `policy revision ${state.revisions.length ? state.revisions[0].revision : "none"}`;
  // Read aloud only when it says something new.
  if (summary !== said) $("summary").textContent = said = summary;
  const notes = [];
  if (state.unreachable.length) notes.push(`Not heard: replica ${state.unreachable.join(", ")}. Their engines are missing here.`);
  $("notice").hidden = !notes.length;
  if ($("notice").textContent !== notes.join(" ")) $("notice").textContent = notes.join(" ");
  const tiles = [
    ["Thinking", t.thinking, "think"], ["Answering", t.answering, "output"], ["Waiting", t.waiting, ""],
    ["Engines gone", t.gone, t.gone ? "warn" : ""],
    ["Answers preempted", t.output_critical, t.output_critical ? "bad" : ""],
    ...Object.entries(t.ended).sort((a, b) => b[1] - a[1]).map(([r, c]) => [`Ended: ${r.replaceAll("_", " ")}`, c, ""]),
  ];
  const totals = $("totals");
  tiles.forEach(([name, value, kind], i) => {
    const tile = totals.children[i] || totals.appendChild(document.createElement("div"));
    if (!tile.firstChild) tile.append(document.createElement("dt"), document.createElement("dd"));
    tile.children[0].textContent = name;
    tile.children[1].textContent = number.format(value);
    tile.children[1].className = kind;
  });
  while (totals.children.length > tiles.length) totals.lastChild.remove();

  table("engines", state.engines, (e) => `${e.id} ${e.incarnation}`, (e) => [
    e.id, e.model, engineState(e),
    e.acked_revision === e.revision ? String(e.revision) : [`${e.acked_revision} of ${e.revision}`, "warn"],
    [number.format(e.thinking), "num think"], [number.format(e.answering), "num output"],
    [number.format(e.waiting), "num"], [`${Math.round(e.kv_used * 100)} %`, "num"], [e.step_time_ms.toFixed(1), "num"],
    [counts(e.ends), "wrap"],
  ], "No engine has connected.");
  more("engines-more", state.engines_left_out, "engines");

  table("forces", state.ends, (d) => `${d.session_id} ${d.decision_id}`, (d) => [
    clock(d.time), d.engine_id, requestLink(d.request_id, d.engine_id), d.reason.replaceAll("_", " "),
    [number.format(d.outcome_think_tokens || (d.signals || {}).think_tokens || 0), "num"], outcome(d), why(d),
  ], "Nothing has been decided.");

  table("requests", state.requests, (r) => `${r.engine} ${r.id}`, (r) => [
    requestLink(r.id, r.engine), r.engine, r.tenant,
    [r.preempted ? `${r.phase}, preempted` : r.phase, r.phase], [number.format(r.think_tokens), "num"],
    [number.format(r.output_tokens), "num"], [r.eat_ema_nats === null ? "" : r.eat_ema_nats, "num"],
    r.last_decision.replaceAll("_", " "),
  ], "No request is live.");
  more("requests-more", state.requests_left_out, "requests");

  table("rollouts", state.rollouts, (r) => r.rollout_id, (r) => [
    r.rollout_id, [lower(r.state, "ROLLOUT_STATE_"), /HALTED|ROLLED_BACK/.test(r.state) ? "bad" : ""],
    `${r.step || 0} of ${((r.plan || {}).step || []).length}`, `${r.stable_revision || 0} → ${r.candidate_revision || 0}`,
    r.author || "", [violation(r) || r.waiting_for || r.reason || "", "wrap"],
  ], "There has been no rollout.");

  table("revisions", state.revisions, (r) => r.revision, (r) => [
    [r.revision, "num"], date(r.create_time), r.author || "", [r.reason || "", "wrap"],
  ], "No policy is stored.");
  $("about").textContent = `meridian-control ${state.version}, replica ${state.replica}`;
}

const violation = (rollout) => (rollout.violation
  ? `${rollout.violation.guardrail} ${short(rollout.violation.value)} against ${short(rollout.violation.limit)}` : "");

function live(is) {
  document.body.classList.toggle("live", is);
  $("connection-text").textContent = is ? "live" : "connection lost, trying again";
}

const events = new EventSource("events");
events.onopen = () => live(true);
events.onerror = () => live(false);
events.onmessage = (event) => show(JSON.parse(event.data));
events.addEventListener("trouble", (event) => {
  $("notice").hidden = false;
  $("notice").textContent = JSON.parse(event.data);
});

// One request's life: a bar of its phases, and what happened, in words.
let asked = 0;
async function life(id, engine) {
  const mine = ++asked;
  const place = $("life");
  let answer;
  try {
    const reply = await fetch(`request?id=${encodeURIComponent(id)}&engine=${encodeURIComponent(engine)}`);
    answer = await reply.json();
  } catch (error) {
    answer = { error: `The control plane did not answer: ${error.message}` };
  }
  if (mine !== asked) return;
  if (answer.error) {
    const text = document.createElement("p");
    text.className = "notice";
    text.textContent = answer.error;
    place.replaceChildren(text);
    return;
  }
  const l = answer.life;
  const heading = document.createElement("h3");
  heading.textContent = `${l.request_id} on ${l.engine_id}`;
  const about = document.createElement("p");
  const finished = l.close_time ? "finished" : "live";
  about.textContent = `${finished}: ${number.format(l.prompt_tokens || 0)} prompt tokens, ` +
    `${number.format(l.think_tokens || 0)} thinking, ${number.format(l.output_tokens || 0)} answer` +
    (l.tenant ? `, tenant ${l.tenant}` : "") + (l.slo_class ? `, class ${l.slo_class}` : "");
  const list = document.createElement("ol");
  list.className = "life";
  const begin = new Date(l.open_time).getTime();
  (l.events || []).forEach((e) => {
    const item = document.createElement("li");
    const d = e.decision;
    const what = d ? `${d.kind}: ${d.reason.replaceAll("_", " ")}` : e.kind.replaceAll("_", " ");
    const text = d ? `${outcome(d)}${why(d)[0] ? ` — ${why(d)[0]}` : ""}`
      : [lower(e.phase, "PHASE_"), (e.detail || "").replaceAll("_", " ")].filter(Boolean).join(", ");
    [[`+${((new Date(e.time).getTime() - begin) / 1000).toFixed(3)} s`, "num"], [what, ""],
      [`${text} (${number.format(e.think_tokens || 0)} thinking, ${number.format(e.output_tokens || 0)} answer)`, ""]]
      .forEach(([t, kind]) => {
        const part = document.createElement("span");
        part.textContent = t;
        part.className = kind;
        item.append(part);
      });
    list.append(item);
  });
  place.replaceChildren(heading, about, bar(l), list);
}

function bar(l) {
  const end = new Date(l.close_time || Date.now()).getTime();
  const changes = (l.events || []).filter((e) => e.phase && !e.decision)
    .map((e) => [new Date(e.time).getTime(), lower(e.phase, "PHASE_")]);
  const parts = [];
  changes.forEach(([at, phase], i) => {
    const until = i + 1 < changes.length ? changes[i + 1][0] : end;
    const last = parts[parts.length - 1];
    if (last && last[0] === phase) last[1] += until - at;
    else parts.push([phase, until - at]);
  });
  const drawn = document.createElement("div");
  drawn.className = "bar";
  drawn.setAttribute("role", "img");
  drawn.setAttribute("aria-label", `Phases: ${parts.map(([p, ms]) => `${p} ${(ms / 1000).toFixed(2)} s`).join(", ")}`);
  parts.forEach(([phase, ms]) => {
    const part = document.createElement("span");
    part.className = phase;
    part.style.flexGrow = Math.max(1, ms);
    part.title = `${phase} ${(ms / 1000).toFixed(2)} s`;
    drawn.append(part);
  });
  return drawn;
}

function follow() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const id = wanted.get("request");
  if (!id) return;
  $("request-id").value = id;
  life(id, wanted.get("engine") || "");
  $("request-heading").focus();
}
window.addEventListener("hashchange", follow);
$("lookup").addEventListener("submit", (event) => {
  event.preventDefault();
  const hash = `#request=${encodeURIComponent($("request-id").value.trim())}`;
  if (location.hash === hash) follow();
  else location.hash = hash;
});
follow();
