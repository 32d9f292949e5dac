// Keeps the place of the page in its address: the view, the filter, the sorting of each table, and the request that is
// shown. `#engines?filter=gpu&engines=-kv_used` shows the engines whose row contains gpu, the fullest KV cache first.

import { $ } from "./rows.js";

// The tables of each view that the control plane sends.
export const VIEWS = {
  overview: [], engines: ["engines", "freezes"], requests: ["requests", "ends"], policy: ["rollouts", "revisions", "self_calibrations"],
  budgets: ["budgets", "tenants"],
};

export function place() {
  // An id that somebody has written into the address may have a question mark of its own.
  const [, view, query] = /^#?([^?]*)\??(.*)$/s.exec(location.hash);
  return Object.hasOwn(VIEWS, view) ? { view, query: new URLSearchParams(query) }
    : { view: "overview", query: new URLSearchParams() };
}

export const address = (view, query) => `#${view}${`${query}` && `?${query}`}`;

// Replaces a part of the place, without a new entry in the history.
export function change(name, value) {
  const { view, query } = place();
  if (value) query.set(name, value);
  else query.delete(name);
  history.replaceState(null, "", address(view, query));
  window.dispatchEvent(new Event("placechange"));
}

// Returns the query of what the control plane is to send.
export function wanted() {
  const { view, query } = place();
  const asked = new URLSearchParams(VIEWS[view].map((table) => [table, query.get(table) || ""]));
  if (query.get("filter")) asked.set("filter", query.get("filter"));
  return `${asked}`;
}

let shown = null;

// Shows the view of the address; returns whether that is another view than before.
export function turn() {
  const { view, query } = place();
  const filter = query.get("filter") || "";
  if ($("filter") !== document.activeElement || view !== shown) $("filter").value = filter;
  if (view === shown) return false;
  for (const name of Object.keys(VIEWS)) $(name).hidden = name !== view;
  for (const link of document.querySelectorAll("nav[aria-label=Views] a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  $("filters").hidden = view === "overview";
  const heading = $(view).querySelector("h2");
  heading.after($("filters"));
  document.title = view === "overview" ? "Meridian" : `${heading.textContent} · Meridian`;
  // What was collected when the view was last shown is too old.
  $(view).classList.add("stale");
  if (shown) {
    window.scrollTo(0, 0);
    heading.focus();
  }
  shown = view;
  return true;
}
