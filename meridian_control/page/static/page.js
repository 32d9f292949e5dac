// Shows the page's contents, which `contents.py` collects and /events sends once a second.

import { keepHistory } from "./history.js";
import { follow, lookAgain } from "./life.js";
import { showOverview, showPhases } from "./overview.js";
import { showRollout } from "./rollout.js";
import { $, clock, counted, element, notice, number, setChildren, setText, SILENCE_MS } from "./rows.js";
import { showSavings } from "./savings.js";
import { showTable } from "./tables.js";
import { change, place, turn, wanted } from "./views.js";

const FILTER_MS = 250, AGAIN_MS = 3000, HISTORY_MS = 15000;

function show(state) {
  const { view } = place();
  showSummary(state);
  if (view === "overview") showOverview(state);
  for (const [name, part] of Object.entries(state.tables)) showTable(name, part, state);
  if (view === "requests") {
    if (state.phases) showPhases(state.phases);
    lookAgain();
  }
  if (view === "policy") {
    showRollout(state.rollout);
    showSavings(state.savings || []);
  }
  $(view).classList.remove("stale");
}

function showSummary(state) {
  const t = state.totals;
  const candidate = state.rollout ? `, revision ${state.rollout.candidate_revision} in a rollout` : "";
  // Screen readers read the summary aloud whenever it changes, so it has no numbers that change all the time.
  setText("summary", `${counted(t.engines, "engine")} connected, ` +
    (t.engines || t.troubled ? `${t.troubled ? number.format(t.troubled) : "none"} in trouble, ` : "") +
    `policy revision ${state.revision || "none"}${candidate}`);
  const missing = state.unreachable.length
    ? `No answer from replica ${state.unreachable.join(", ")}. This page lacks the engines there.` : "";
  notice("access", state.access);
  const harm = (state.harm || []).map((sentence) => sentence[0].toUpperCase() + sentence.slice(1));
  notice("notice", [...harm, state.withdrawn, missing, state.store_trouble].filter(Boolean).join(" "));
  const zone = new Intl.DateTimeFormat().resolvedOptions().timeZone;
  setText("about", `meridian-control ${state.version}, replica ${state.replica}; times of day are those of ${zone}`);
  $("links").hidden = !Object.keys(state.links).length;
  setChildren("links", Object.entries(state.links).map(([name, url]) => {
    const link = element("a", "", name);
    link.href = url;
    link.rel = "noreferrer";
    return link;
  }));
}

// ------------------------------------------------------------------------------------------------------- stream

let paused = false;
// Whether the next event is shown also while the page is paused, because the reader has asked for something else.
let due = false;
let newest = null;
let version = null;
let heard = null;
let events = null;
let asked = null;
let timer = null;

// Numbers that nobody vouches for are worse than none, so the page hides them while the control plane is gone.
function connected(is, why = "The control plane does not answer, so nothing is shown.") {
  document.body.classList.toggle("live", is && !paused);
  setText("connection-text", paused ? "paused" : is ? "live" : "connection lost, trying again");
  if (paused) return;
  document.querySelector("main").hidden = !is;
  if (is) return notice("gone", "");
  const last = heard ? ` The page heard from it last at ${clock(heard)}.` : "";
  setText("summary", "The control plane does not answer");
  notice("gone", `${why}${last} Engines keep serving without it.`);
}

function later(milliseconds, act) {
  clearTimeout(timer);
  timer = setTimeout(act, milliseconds);
}

// A hung control plane, or a network that is lost, breaks no connection.
function expect() {
  later(SILENCE_MS, () => {
    connected(false);
    listen();
  });
}

function listen() {
  expect();
  if (events) events.close();
  asked = wanted();
  newest = null;
  due = true;
  const stream = new EventSource(`events?${asked}`);
  events = stream;
  stream.onerror = () => {
    if (stream !== events) return;
    const refused = stream.readyState === EventSource.CLOSED;
    connected(false, refused ? "This page was not let in by the control plane, because too many are open, or by a proxy before it." : undefined);
    // A browser tries again by itself only if the connection broke.
    if (refused) later(AGAIN_MS, listen);
  };
  stream.onmessage = (event) => {
    if (stream !== events) return;
    newest = JSON.parse(event.data);
    // Another version's contents need its own page.
    version ??= newest.version;
    if (version !== newest.version && !paused) return location.reload();
    heard = Date.now();
    if (!paused || due) show(newest);
    due = false;
    expect();
    connected(true);
  };
  stream.addEventListener("looking", () => stream === events && expect());
  stream.addEventListener("trouble", (event) => {
    if (stream !== events) return;
    notice("notice", JSON.parse(event.data));
    if (!paused) $(place().view).classList.add("stale");
    expect();
    connected(true);
  });
}

// Asks for what the place needs, unless the stream sends it already.
function arrive() {
  if (turn()) keepHistory();
  follow();
  if (asked !== wanted()) listen();
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  const open = events.readyState === EventSource.OPEN && newest !== null;
  connected(open);
  if (!paused && open) show(newest);
});
$("skip").addEventListener("click", (event) => {
  event.preventDefault();
  $(place().view).querySelector("h2").focus();
});
$("filters").addEventListener("submit", (event) => event.preventDefault());
let typed = null;
$("filter").addEventListener("input", () => {
  clearTimeout(typed);
  typed = setTimeout(() => change("filter", $("filter").value.trim()), FILTER_MS);
});
$("lookup").addEventListener("submit", (event) => {
  event.preventDefault();
  const query = new URLSearchParams({ id: $("request-id").value.trim() });
  if (place().query.get("id") === query.get("id")) follow(true);
  else location.hash = `requests?${query}`;
});
window.addEventListener("hashchange", arrive);
window.addEventListener("placechange", arrive);
// A page that nobody sees asks for nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    clearTimeout(timer);
    events.close();
  } else {
    listen();
    keepHistory();
  }
});
arrive();
setInterval(() => paused || keepHistory(), HISTORY_MS);
