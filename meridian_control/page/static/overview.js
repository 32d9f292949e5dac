// Shows the overview: the most important numbers, and what an operator should look at.

import { $, counted, element, number, percent, setChildren, setText, tile } from "./rows.js";
import { waiting } from "./savings.js";
import { address } from "./views.js";

const PHASES = [["prompt", "Reading the prompt"], ["think", "Thinking"], ["output", "Answering"]];

function numbers(state) {
  const t = state.totals, rules = (state.savings || []).find((s) => s.in_force) || {};
  const saved = rules.saved_ratio, harm = rules.harm_ratio;
  const gone = t.gone ? `${number.format(t.gone)} gone in the last 10 minutes` : "none gone in the last 10 minutes";
  const harms = (state.harm || []).length ? "bad" : "";
  return [
    tile("Engines connected", number.format(t.engines), "", gone),
    tile("Thinking now", number.format(t.thinking), "think", `${number.format(t.waiting)} waiting in vLLM`),
    tile("Answering now", number.format(t.answering), "output",
      `${t.output_critical ? number.format(t.output_critical) : "none"} preempted, the target is 0`),
    tile("Thinking saved", saved ? percent(saved.value) : "not known", saved ? "" : "unknown",
      saved ? `${percent(saved.low)} to ${percent(saved.high)}` : unknown(rules)),
    tile("Harm, at most", harm ? percent(harm.high, 2) : "not known", harm ? harms : "unknown",
      harm ? `allowed ${percent(rules.max_loss, 2)}` : "no harm is measured"),
    tile("Engines frozen", number.format(t.frozen), t.frozen ? "warn" : "", t.frozen ? "they run as stock vLLM" : ""),
  ];
}

function unknown(rules) {
  const waits = rules.treated ? waiting(rules) : 0;
  return waits ? `${counted(waits, "closed request")} not counted yet` : "the control group has too few requests";
}

function line({ level, text, view }) {
  const link = element("a", "", "show");
  link.href = address(view, "");
  link.setAttribute("aria-label", `show: ${text}`);
  return element("li", level || "quiet", element("span", "", text), " ", link);
}

export function showOverview(state) {
  setChildren("tiles", numbers(state));
  setChildren("attention", state.attention.map(([level, text, view]) => line({ level, text, view })));
  $("attention-none").hidden = Boolean(state.attention.length);
  setText("ended", state.totals.ended || "none");
  $("capabilities-section").hidden = !state.capabilities.length;
  setChildren("capabilities", state.capabilities.map(([name, row, text]) => tile(`${name}: ${row}`, text, "", "")));
}

export function showPhases(phases) {
  setChildren("phases", PHASES.map(([phase, name]) => {
    const p = phases[phase];
    const others = [p.new && `${number.format(p.new)} new`, p.preempted && `${number.format(p.preempted)} preempted`];
    const more = `${number.format(p.generating)} generating${others.filter(Boolean).map((o) => `, ${o}`).join("")}`;
    return tile(name, number.format(p.new + p.generating + p.preempted), phase, more);
  }));
}
