// Shows the control group: what shortening saves, and how much harm each kind of shortening does.

import { $, fillRows, num, number, percent } from "./rows.js";
import { fold, setHead } from "./tables.js";

const NONE = "Nothing is compared: nothing in force shortens thinking, or entropy.holdout_share is 0.";
const SAVINGS = [["Arm"], ["Rules since", "num"], ["Requests", "num"], ["Thinking, mean", "num"], ["Stopped", "num"],
  ["Answer, mean", "num"], ["Re-entries", "num"], ["Aborted", "num"], ["By length", "num"], ["Saved"], ["Harm"],
  ["Drift"], ["Ends that spill"]];
const HARM = [["Shortened by"], ["Rules since", "num"], ["Judged", "num"], ["Would end", "num"], ["Harmful", "num"],
  ["Not judged", "num"], ["Harm"], ["After its ends"], ["After natural ends"]];
const mean = (sum, count) => [+count ? (sum / count).toFixed(1) : "", "num"];
const share = (part, whole) => [+whole ? percent(part / whole) : "", "num"];

export function saved(s) {
  const r = s.saved_ratio;
  return r ? `${percent(r.value)} (${percent(r.low)} to ${percent(r.high)})` : "too few requests";
}

function spilled(s, arm) {
  const side = arm === "treated" ? s.forced_ends : s.natural_ends, r = s.spills;
  if (!side || !r) return "too few ends";
  const found = percent((+side.reentries + +side.long_answers) / +side.ends);
  return arm === "control" ? found : `${found}, difference ${percent(r.low)} to ${percent(r.high)}`;
}

function followed(ends) {
  const n = Number((ends || {}).ends || 0);
  if (!n) return "none";
  const parts = [["empty_answers", "empty"], ["reentries", "thought again"], ["lengths", "by length"]];
  return `${number.format(n)}: ${parts.map(([field, name]) => `${percent(+ends[field] / n)} ${name}`).join(", ")}`;
}

export function showSavings(savings) {
  const rows = savings.flatMap((s) => ["treated", "control"].map((arm) => ({ s, arm, counts: s[arm] })));
  setHead($("savings-table"), SAVINGS);
  fillRows($("savings-table"), rows, (r) => `${r.s.rules} ${r.arm}`, ({ s, arm, counts: c }) => [
    arm === "treated" ? "treated" : "control group", num(s.since_revision), num(c.requests),
    mean(c.think_tokens, c.requests), share(c.stopped, c.requests), mean(c.answer_tokens, c.answers),
    share(c.reentries, c.requests), share(c.aborts, c.requests), share(c.lengths, c.requests),
    arm === "treated" ? saved(s) : "", arm === "control" ? [s.harm, "wrap"] : "",
    arm === "control" ? [s.drift, "wrap"] : "", spilled(s, arm),
  ]);
  fold($("savings-table"), rows.length ? "" : NONE);
  const kinds = savings.flatMap((s) => s.kinds.map((k) => ({ s, k })));
  setHead($("harm-table"), HARM);
  fillRows($("harm-table"), kinds, (r) => `${r.s.rules} ${r.k.text}`, ({ s, k }) => [
    [k.text, k.level], num(s.since_revision), num(k.judged), num(k.judged_stops), num(k.harmful), num(k.unjudged),
    [k.harm, "wrap"], [followed(k.forced_ends), "wrap"], [followed(k.natural_ends), "wrap"],
  ]);
  fold($("harm-table"), kinds.length ? "" : "Nothing in force shortens thinking, so nothing can do harm.");
}
