// Shows the rollouts in a table, and the active rollout with its steps and guardrails.

import { $, clock, counted, element, lasting, notice, number, setText, short, table, words } from "./rows.js";

const ACTIVE = ["ROLLOUT_STATE_RUNNING", "ROLLOUT_STATE_PAUSED", "ROLLOUT_STATE_HALTED"];
const LEVELS = {
  ROLLOUT_STATE_HALTED: "bad", ROLLOUT_STATE_ROLLED_BACK: "bad", ROLLOUT_STATE_PAUSED: "warn",
  ROLLOUT_STATE_ABORTED: "warn",
};
export const isActive = (r) => ACTIVE.includes(r.state);
const state = (r) => words(r.state, "ROLLOUT_STATE_");

export function showRollouts(rollouts) {
  const active = rollouts.find(isActive);
  $("rollout").hidden = !active;
  if (active) showActive(active);
  table("rollouts", rollouts, (r) => r.rollout_id, (r) => {
    const last = r.events[r.events.length - 1];
    return [
      [r.rollout_id, "num"], [state(r), LEVELS[r.state] || ""], `${r.step} of ${r.plan.step.length}`,
      `${r.stable_revision} → ${r.candidate_revision}` + (+r.rollback_revision ? ` → ${r.rollback_revision}` : ""),
      last ? `${words(last.event)} ${clock(last.time)}` : "", r.author,
      [violation(r) || r.reason, "wrap"],
    ];
  }, "There has been no rollout.");
}

function violation(r) {
  return r.violation ? `${r.violation.guardrail} ${short(r.violation.value)}, limit ${short(r.violation.limit)}` : "";
}

function showActive(r) {
  setText("rollout-heading", `Rollout ${r.rollout_id}: ${state(r)}, step ${r.step} of ${r.plan.step.length}`);
  $("rollout-heading").className = LEVELS[r.state] || "";
  setText("rollout-about", `Revision ${r.stable_revision} → ${r.candidate_revision}: ` +
    `${counted(r.candidate_engines, "engine")} with the candidate, ${number.format(r.other_engines)} without. ` +
    `${r.author}: ${r.reason}`);
  const steps = r.plan.step.map((step, i) => stepItem(r, step, i + 1));
  $("rollout-steps").replaceChildren(...steps);
  const waits = r.state === "ROLLOUT_STATE_HALTED"
    ? `The rollout is halted: ${violation(r)}. Resume or abort the rollout with meridianctl.`
    : r.waiting_for ? `The rollout waits for ${r.waiting_for}.` : "";
  notice("rollout-waiting", waits);
  table("guardrails", r.guardrails, (g) => g.guardrail, (g) => [
    g.guardrail, g.violated ? ["violated", "bad"] : g.waiting ? ["too few observations", "warn"]
      : g.value == null ? ["not measured", "warn"] : ["within", "good"],
    [short(g.value), "num"], [short(g.limit), "num"], [number.format(g.observations), "num"],
    [+g.stable_observations ? number.format(g.stable_observations) : "", "num"],
  ], "The plan has no guardrails, or nothing has been measured yet.");
}

function stepItem(r, step, at) {
  const labels = Object.entries(step.engine_labels).map(([name, glob]) => `${name}=${glob}`).join(", ");
  const whom = [step.percent < 100 || !labels ? `${step.percent} %` : "", labels].filter(Boolean).join(" of ");
  if (at < r.step) return element("li", "done", `${whom}: done`);
  if (at > r.step) return element("li", "", `${whom}: later, watched for ${lasting(step.bake_s)}`);
  const bar = document.createElement("progress");
  bar.max = step.bake_s;
  bar.value = Math.min(r.baked_s, step.bake_s);
  bar.setAttribute("aria-label", "Elapsed time of this step");
  const item = element("li", "now", `${whom}: watched ${lasting(r.baked_s)} of ${lasting(step.bake_s)} `, bar);
  item.setAttribute("aria-current", "step");
  return item;
}
