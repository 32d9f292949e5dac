// The tables of the page: their columns, the field that sorts each column, and what an empty one says.

import { $, counted, date, element, fillRows, notice, num, number, percent, reasons } from "./rows.js";
import { address, change, place } from "./views.js";

function requestLink(request, engine) {
  const link = element("a", "", request);
  link.href = address("requests", new URLSearchParams({ id: request, engine }));
  return link;
}

function tenantLink(tenant) {
  if (!tenant) return "none named";
  const link = element("a", "", tenant);
  link.href = address("requests", new URLSearchParams({ filter: tenant }));
  return link;
}

function condition(e) {
  const cause = e.cause ? [element("span", "cause", e.cause)] : [];
  return element("div", "state", element("span", e.level || "good", e.word), ...cause);
}

const PHASES = { prompt: "reading the prompt", think: "thinking", output: "answering" };
const several = (name) => (rows) => new Set(rows.map((row) => row[name])).size > 1;
const some = (name) => (rows) => rows.some((row) => row[name]);
const plain = (name) => (row) => row[name];
const wrapped = (name) => (row) => [row[name], "wrap"];
const count = (name) => (row) => num(row[name]);
const applied = (e) => (e.acked_revision === e.revision ? [number.format(e.revision), "num"]
  : [`${number.format(e.acked_revision)}, wanted ${number.format(e.revision)}`, "num warn"]);

// Columns are [title, field, cell, whether it has numbers, in which rows it is shown].
const TABLES = {
  engines: {
    key: (e) => `${e.id} ${e.incarnation}`, what: "engine",
    none: () => "No engine has connected. An engine connects with MERIDIAN_CONTROL=HOST:PORT in its environment.",
    columns: [
      ["Engine", "id", plain("id")], ["State", "word", condition], ["Model", "model", plain("model")],
      ["Revision", "acked_revision", applied, true],
      ["Step, ms", "step_time_ms", (e) => [e.step_time_ms ? e.step_time_ms.toFixed(1) : "", "num"], true],
      ["KV", "kv_used", (e) => [`${Math.round(e.kv_used * 100)} %`, "num"], true],
      ["Running", "running", count("running"), true], ["Waiting", "waiting", count("waiting"), true],
      ["Thinking", "thinking", (e) => [number.format(e.thinking), "num think"], true],
      ["Answering", "answering", (e) => [number.format(e.answering), "num output"], true],
      ["Thinking ended", "", wrapped("ends")], ["Handovers", "", wrapped("handovers"), false, some("handovers")],
      ["Replica", "replica", plain("replica"), false, several("replica")],
    ],
  },
  freezes: {
    key: (f) => f.freeze_id, what: "freeze", none: () => "No freeze is in force.",
    columns: [
      ["Freeze", "freeze_id", plain("freeze_id"), true], ["Engines", "match", wrapped("match")],
      ["Time left", "end_time", plain("left")],
      ["Confirmed", "confirmed", (f) => [`${f.confirmed} of ${counted(f.engines, "engine")}`,
        f.confirmed < f.engines ? "warn" : ""]],
      ["Author", "author", plain("author")], ["Reason", "reason", wrapped("reason")],
    ],
  },
  requests: {
    key: (r) => `${r.engine} ${r.request}`, what: "request",
    none: (state) => (state.totals.engines ? "No request is live." : "No request is live, because no engine is connected."),
    columns: [
      ["Engine", "engine", plain("engine")], ["Request", "request", (r) => [requestLink(r.request, r.engine), ""]],
      ["Tenant", "tenant", plain("tenant"), false, some("tenant")],
      ["Phase", "phase", (r) => [`${PHASES[r.phase] || "unknown"}${r.preempted ? ", preempted" : ""}`, r.phase]],
      ["Thinking", "think_tokens", count("think_tokens"), true], ["Answer", "output_tokens", count("output_tokens"), true],
      ["EAT, nats", "eat_ema_nats", (r) => [r.eat_ema_nats ?? "", "num"], true],
      ["Last decision", "last_decision", wrapped("last_decision")],
    ],
  },
  ends: {
    key: (d) => d.key, what: "end",
    none: () => "No thinking has been ended: no rule has fired, and no request has reached its cap.",
    columns: [
      ["Time", "time", (d) => date(d.time)], ["Engine", "engine", plain("engine")],
      ["Request", "request", (d) => [requestLink(d.request, d.engine), ""]], ["Why", "reason", wrapped("reason")],
      ["Thinking", "think_tokens", count("think_tokens"), true],
      ["Outcome", "outcome", (d) => [d.outcome, d.level]], ["Compared by the rule", "", (d) => reasons(d.why)],
    ],
  },
  rollouts: {
    key: (r) => r.rollout_id, what: "rollout",
    none: () => "There has been no rollout. meridianctl rollout start brings a policy to the fleet in steps.",
    columns: [
      ["Rollout", "rollout_id", plain("rollout_id"), true], ["State", "state", (r) => [r.state, r.level]],
      ["Step", "step", plain("step")], ["Revision", "revisions", plain("revisions")],
      ["Last event", "time", (r) => `${r.event} ${date(r.time)}`], ["Author", "author", plain("author")],
      ["Reason", "reason", wrapped("reason")],
    ],
  },
  revisions: {
    key: (r) => r.revision, what: "revision", none: () => "No policy is stored: the defaults hold.",
    columns: [
      ["Revision", "revision", plain("revision"), true],
      ["In force on", "engines", (r) => (r.engines ? counted(r.engines, "engine") : "none")],
      ["Time", "create_time", (r) => date(r.create_time)], ["Author", "author", plain("author")],
      ["Reason", "reason", wrapped("reason")],
    ],
  },
  self_calibrations: {
    key: (c) => `${c.model} ${c.model_fingerprint} ${c.slo_class}`, what: "model and class",
    none: () => "No policy asks for self-calibration: entropy.self_calibration is false, or nothing is recorded yet.",
    columns: [
      ["Model", "model", plain("model")], ["Class", "slo_class", (c) => c.slo_class || "none"],
      ["State", "state", (c) => [c.state, c.state === "withdrawn" ? "warn" : ""]], ["Since", "since_time", (c) => date(c.since_time)],
      ["Requests", "recorded_requests", wrapped("requests")], ["Rule", "rule", wrapped("proof")],
      ["Why, and what was tried", "why", wrapped("tried")],
    ],
  },
  budgets: {
    key: (b) => b.name, what: "budget",
    none: () => "The policy has no budget. An entry [[budget]] limits the thinking tokens of a model, tenant or class.",
    columns: [
      ["Budget", "name", plain("name")], ["Requests", "requests", wrapped("requests")],
      ["Stage", "stage", (b) => [b.stage, b.level]], ["Left", "left_ratio", (b) => [percent(b.left_ratio, 0), "num"], true],
      ["Of the minute", "", (b) => [b.of_minute, "num"], true], ["Of the day", "", (b) => [b.of_day, "num"], true],
      ["Used", "used_tokens", count("used_tokens"), true],
    ],
  },
  tenants: {
    key: (t) => `${t.tenant} ${t.model}`, what: "tenant",
    none: () => "No request has thought yet on this replica.",
    columns: [
      ["Tenant", "tenant", (t) => [tenantLink(t.tenant), ""]], ["Model", "model", plain("model")],
      ["Thinking tokens", "think_tokens", count("think_tokens"), true],
      ["Share", "share", (t) => [percent(t.share), "num"], true],
    ],
  },
};

// Shows a sentence in place of a table without rows.
export function fold(table, text) {
  const scroll = table.parentElement;
  let empty = scroll.previousElementSibling;
  if (!empty || !empty.classList.contains("empty")) {
    empty = element("p", "empty");
    scroll.before(empty);
  }
  if (empty.textContent !== text) empty.textContent = text;
  empty.hidden = !text;
  scroll.hidden = Boolean(text);
}

export function setHead(table, titles) {
  const names = titles.map(([title]) => title).join("|");
  if (table.dataset.head === names) return;
  table.dataset.head = names;
  table.replaceChildren();
  const row = table.createTHead().insertRow();
  for (const [title, kind, content] of titles) {
    const th = element("th", kind || "", content || title);
    th.scope = "col";
    row.append(th);
  }
}

// The order that a click on a column asks for: numbers begin with the largest; the third click takes the order back.
function next(field, numbers, now) {
  const orders = numbers ? [`-${field}`, field] : [field, `-${field}`];
  return now === orders[0] ? orders[1] : now === orders[1] ? "" : orders[0];
}

function sortButton(name, title, field, numbers) {
  const button = element("button", "sort", title);
  button.type = "button";
  button.addEventListener("click", () => change(name, next(field, numbers, place().query.get(name) || "")));
  return button;
}

export function showTable(name, part, state) {
  const { key, what, none, columns } = TABLES[name];
  const table = $(`${name}-table`), query = place().query, filter = query.get("filter");
  const shown = columns.filter(([, , , , when]) => !when || when(part.rows));
  setHead(table, shown.map(([title, field, , numbers], i) => [title, numbers && i ? "num" : "",
    field && sortButton(name, title, field, numbers)]));
  const sorted = query.get(name) || "";
  shown.forEach(([, field], i) => {
    const order = field && sorted.replace("-", "") === field ? (sorted[0] === "-" ? "descending" : "ascending") : "none";
    if (field) table.tHead.rows[0].cells[i].setAttribute("aria-sort", order);
  });
  fillRows(table, part.rows, key, (row) => shown.map(([, , cell]) => cell(row)));
  fold(table, part.rows.length ? "" : part.all ? `None of ${counted(part.all, what)} contains “${filter}”.` : none(state));
  const left = part.matching > part.rows.length
    ? `The first ${number.format(part.rows.length)} of ${number.format(part.matching)} are shown; filter or sort to see others.` : "";
  const found = filter && part.rows.length ? `${number.format(part.matching)} of ${counted(part.all, what)} contain “${filter}”.` : "";
  let more = table.parentElement.nextElementSibling;
  if (!more) table.parentElement.after(more = element("p", "more"));
  const text = [found, left].filter(Boolean).join(" ");
  if (more.textContent !== text) more.textContent = text;
  more.hidden = !text;
}
