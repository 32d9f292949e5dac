// Shows the control group: what shortening saves, and how much harm each kind of shortening does.

import { $, counted, element, fillRows, num, number, percent } from "./rows.js";
import { fold, setHead } from "./tables.js";

const ARMS = [["Arm"], ["Requests", "num"], ["Thinking, mean", "num"], ["Stopped", "num"], ["Answer, mean", "num"],
  ["Re-entries", "num"], ["Aborted", "num"], ["By length", "num"]];
const HARM = [["Shortened by"], ["Rules since", "num"], ["Judged", "num"], ["Would end", "num"], ["Harmful", "num"],
  ["Not judged", "num"], ["Harm"], ["After its ends"], ["After natural ends"]];
const mean = (sum, count) => [+count ? (sum / count).toFixed(1) : "", "num"];
const share = (part, whole) => [+whole ? percent(part / whole) : "", "num"];

// Returns the number of closed requests that do not count yet.
export const waiting = ({ treated, control }) => treated.waiting_requests + control.waiting_requests;

function saved(s) {
  const r = s.saved_ratio;
  return r ? `${percent(r.value)} of the thinking (${percent(r.low)} to ${percent(r.high)})`
    : "not known yet, because an arm has too few requests";
}

// Keeps a card for each set of rules: the two arms, and what follows from them.
function card(s, at) {
  let made = $("savings").children[at];
  if (!made) {
    const scroll = element("div", "scroll", element("table", ""));
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    made = element("div", "card", element("h4", ""), scroll, element("dl", "facts"));
    $("savings").append(made);
  }
  const [heading, scroll, facts] = made.children, table = scroll.firstChild;
  heading.textContent = `${s.in_force ? "Current rules" : "Other rules"}, since revision ${s.since_revision}`;
  scroll.setAttribute("aria-label", heading.textContent);
  setHead(table, ARMS);
  fillRows(table, ["treated", "control"], (arm) => arm, (arm) => {
    const c = s[arm];
    return [arm === "treated" ? "treated" : "control group", num(c.requests), mean(c.think_tokens, c.requests),
      share(c.stopped, c.requests), mean(c.answer_tokens, c.answers), share(c.reentries, c.requests),
      share(c.aborts, c.requests), share(c.lengths, c.requests)];
  });
  const told = [["Saved", saved(s)], ["Harm", s.harm], ["Drift", s.drift]];
  const waits = waiting(s);
  if (waits) told.splice(1, 0, ["Not counted yet", `${counted(waits, "request")}, because others that began earlier still run`]);
  const lines = told.map(([name, text]) => element("div", "", element("dt", "", name), element("dd", "", text)));
  const shown = [...facts.children];
  if (shown.length !== lines.length || lines.some((line, i) => !shown[i].isEqualNode(line))) facts.replaceChildren(...lines);
}

function followed(ends) {
  const n = Number((ends || {}).ends || 0);
  if (!n) return "none";
  const parts = [["empty_answers", "empty"], ["reentries", "thought again"], ["lengths", "by length"]];
  return `${number.format(n)}: ${parts.map(([field, name]) => `${percent(+ends[field] / n)} ${name}`).join(", ")}`;
}

export function showSavings(savings) {
  savings.forEach(card);
  while ($("savings").children.length > savings.length) $("savings").lastElementChild.remove();
  $("savings-none").hidden = Boolean(savings.length);
  const kinds = savings.flatMap((s) => s.kinds.map((k) => ({ s, k })));
  setHead($("harm-table"), HARM);
  fillRows($("harm-table"), kinds, (r) => `${r.s.rules} ${r.k.text}`, ({ s, k }) => [
    [k.text, k.level], num(s.since_revision), num(k.judged), num(k.judged_stops), num(k.harmful), num(k.unjudged),
    [k.harm, "wrap"], [followed(k.forced_ends), "wrap"], [followed(k.natural_ends), "wrap"],
  ]);
  fold($("harm-table"), kinds.length ? "" : "No rule, budget or pressure in force shortens thinking, so no harm is measured.");
}
