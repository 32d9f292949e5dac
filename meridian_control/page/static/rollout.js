// Shows the active rollout with its steps and guardrails.

import { $, counted, element, fillRows, lasting, notice, num, setText, words } from "./rows.js";
import { fold, setHead } from "./tables.js";

const LEVELS = { ROLLOUT_STATE_HALTED: "bad", ROLLOUT_STATE_PAUSED: "warn" };
const HEAD = [["Guardrail"], ["Verdict"], ["Value", "num"], ["Limit", "num"], ["Observations", "num"],
  ["On other engines", "num"]];

export function showRollout(r) {
  $("rollout").hidden = !r;
  if (!r) return;
  const state = words(r.state, "ROLLOUT_STATE_");
  setText("rollout-heading", `Rollout ${r.rollout_id}: ${state}, step ${r.step} of ${r.plan.step.length}`);
  $("rollout-heading").className = LEVELS[r.state] || "";
  const others = +r.other_engines ? `${counted(r.other_engines, "engine")} without it` : "no engine without it";
  const begun = r.author ? ` Started by ${r.author}${r.reason ? `: ${r.reason}` : ""}.` : r.reason ? ` ${r.reason}.` : "";
  setText("rollout-about", `From revision ${r.stable_revision} to the candidate, revision ${r.candidate_revision}: ` +
    `${counted(r.candidate_engines, "engine")} with the candidate, ${others}.${begun}`);
  $("rollout-steps").replaceChildren(...r.plan.step.map((step, i) => stepItem(r, step, i + 1)));
  const why = r.violation || "a guardrail was violated";
  notice("rollout-waiting", r.state === "ROLLOUT_STATE_HALTED"
    ? `The rollout is halted, because ${why}. Resume or abort it with meridianctl rollout.`
    : r.waiting_for ? `The rollout waits for ${r.waiting_for}.` : "");
  setHead($("guardrails-table"), HEAD);
  fillRows($("guardrails-table"), r.guardrails, (g) => g.guardrail, (g) => [
    g.guardrail, g.violated ? ["violated", "bad"] : g.waiting ? ["too few observations", "warn"]
      : g.value === "not measured" ? [g.value, "warn"] : ["within", "good"],
    [g.value, "num"], [g.limit, "num"], num(g.observations),
    +g.stable_observations ? num(g.stable_observations) : "",
  ]);
  fold($("guardrails-table"), r.guardrails.length ? "" : "The plan has no guardrails, or nothing has been measured yet.");
}

function stepItem(r, step, at) {
  const labels = Object.entries(step.engine_labels).map(([name, glob]) => `${name}=${glob}`).join(", ");
  const share = step.percent < 100 || !labels ? `${step.percent} % of the engines` : "the engines";
  const whom = labels ? `${share} with ${labels}` : share;
  if (at < r.step) return element("li", "done", `${whom}: done`);
  if (at > r.step) return element("li", "", `${whom}: later, watched for at least ${lasting(step.bake_s)}`);
  const bar = document.createElement("progress");
  bar.max = step.bake_s;
  bar.value = Math.min(r.baked_s, step.bake_s);
  bar.setAttribute("aria-label", "Elapsed time of this step");
  const item = element("li", "now", `${whom}: watched ${lasting(r.baked_s)} of at least ${lasting(step.bake_s)} `, bar);
  item.setAttribute("aria-current", "step");
  return item;
}
