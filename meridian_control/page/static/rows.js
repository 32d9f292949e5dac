// Helpers for words, numbers and tables. Rows are changed in place, so that focus and selection stay.

export const $ = (id) => document.getElementById(id);
export const number = new Intl.NumberFormat("en");
export const clock = (stamp) => (stamp ? new Date(stamp).toLocaleTimeString() : "");
export const date = (stamp) => (stamp ? new Date(stamp).toLocaleString() : "");
export const words = (name, prefix = "") => (name || "").replace(prefix, "").toLowerCase().replaceAll("_", " ");
export const counted = (count, what) => `${number.format(count)} ${what}${count === 1 ? "" : "s"}`;

export function short(value) {
  if (value === undefined || value === null) return "not measured";
  const plain = Math.abs(value) >= 1000 || Number.isInteger(value);
  return plain ? number.format(value) : String(+(+value).toPrecision(3));
}

export function lasting(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  return whole < 120 ? `${whole} s` : `${number.format(Math.round(whole / 60))} min`;
}

export function element(tag, kind, ...children) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  made.append(...children);
  return made;
}

export function setText(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

// Shows a text in an element, and hides the element if the text is empty.
export function notice(id, text) {
  setText(id, text);
  $(id).hidden = !text;
}

// Fills a row with cells, each of which is a text, a pair [text, class], or a node.
function fill(row, cells) {
  cells.forEach((cell, i) => {
    const td = row.cells[i] || row.insertCell();
    if (cell instanceof Node) {
      if (td.firstChild && td.firstChild.isEqualNode(cell)) return;
      td.className = "wrap";
      td.replaceChildren(cell);
      return;
    }
    const [text, kind] = Array.isArray(cell) ? cell : [cell, ""];
    if (td.textContent !== String(text)) td.textContent = text;
    if (td.className !== kind) td.className = kind;
  });
}

export function table(id, rows, key, cells, none) {
  const body = $(id).tBodies[0];
  const known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  rows.forEach((item, i) => {
    const name = String(key(item));
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
  if (rows.length) return;
  const row = body.insertRow();
  row.dataset.key = "";
  const td = row.insertCell();
  td.colSpan = $(id).tHead.rows[0].cells.length;
  td.className = "empty";
  td.textContent = none;
}

export const leftOut = (id, count, what) => notice(id, count ? `${counted(count, `more ${what}`)} not shown.` : "");

export function requestLink(id, engine) {
  const link = element("a", "id", id);
  link.href = `#request=${encodeURIComponent(id)}&engine=${encodeURIComponent(engine)}`;
  return link;
}

// ---------------------------------------------------------------------------------------------------- decisions

const OPERATORS = { ">=": "≥", "<=": "≤" };

export function outcome(decision) {
  const name = words(decision.outcome, "OUTCOME_");
  const known = name === "unspecified" ? "open" : name;
  return decision.shadow && known !== "shadowed" ? `${known} (shadow)` : known;
}

// Returns the numbers that a rule compared, or the operator's reason, followed by `more`; inFull adds the names of the
// limits.
export function compared(decision, inFull, ...more) {
  const told = decision.comparisons.map((c) => {
    const seen = `${c.signal} ${short(c.value)} ${OPERATORS[c.operator] || c.operator} ${short(c.limit)}`;
    return inFull ? `${seen} (${c.limit_name})` : seen;
  });
  const parts = [...told, decision.operator_reason, ...more, decision.detail].filter(Boolean);
  return element("div", "", ...parts.flatMap((text, i) => [i ? ", " : "", element("span", "comparison", text)]));
}
