// Helpers for texts, numbers and tables. Rows are changed in place, so that focus and selection stay.

// Milliseconds after which the page no longer waits for a control plane that says nothing.
export const SILENCE_MS = 20000;
// Characters above which a text that otherwise stays on one line is broken into several.
const LONG = 40;
// Characters above which a text scrolls in a place of a few lines, and above which one is no comparison.
const VERY_LONG = 300, SENTENCE = 120;
export const $ = (id) => document.getElementById(id);
export const number = new Intl.NumberFormat("en");
export const clock = (stamp) => (stamp ? new Date(stamp).toLocaleTimeString() : "");
export const date = (stamp) => (stamp ? new Date(stamp).toLocaleString() : "");
export const words = (name, prefix = "") => (name || "").replace(prefix, "").toLowerCase().replaceAll("_", " ");
export const counted = (count, what) => `${number.format(count)} ${what}${+count === 1 ? "" : "s"}`;
export const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
export const num = (value) => [value === null || value === undefined ? "" : number.format(value), "num"];

export const answerTo = async (question) => (await fetch(question, { signal: AbortSignal.timeout(SILENCE_MS) })).json();

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

// Replaces the children that have changed; a link in one keeps the focus.
export function setChildren(id, made) {
  const parent = $(id);
  made.forEach((child, i) => {
    const old = parent.children[i];
    if (!old) parent.append(child);
    else if (!old.isEqualNode(child)) {
      const focused = old.contains(document.activeElement);
      old.replaceWith(child);
      if (focused) child.querySelector("a")?.focus();
    }
  });
  while (parent.children.length > made.length) parent.lastElementChild.remove();
}

// Fills a row with cells, each of which is a text, a pair [text, class], or a node.
function fill(row, cells) {
  cells.forEach((cell, i) => {
    let td = row.cells[i];
    if (!td) {
      td = document.createElement(i ? "td" : "th");
      if (!i) td.scope = "row";
      row.append(td);
    }
    let [content, looks] = Array.isArray(cell) ? cell : [cell, cell instanceof Node ? "wrap" : ""];
    if (String(content).length > VERY_LONG) content = element("div", "text", content);
    const long = !looks.includes("wrap") && String(content?.textContent ?? content).length > LONG;
    const kind = long ? `${looks} long`.trim() : looks;
    if (td.className !== kind) td.className = kind;
    if (content instanceof Node) {
      if (!td.firstChild || !td.firstChild.isEqualNode(content)) td.replaceChildren(content);
    } else if (td.textContent !== String(content ?? "")) {
      td.textContent = content ?? "";
    }
  });
}

export function fillRows(table, rows, key, cells) {
  const body = table.tBodies[0] || table.createTBody();
  const known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  rows.forEach((item, i) => {
    const name = String(key(item, i));
    let row = known.get(name);
    known.delete(name);
    if (!row) {
      row = document.createElement("tr");
      row.dataset.key = name;
    }
    if (body.rows[i] !== row) body.insertBefore(row, body.rows[i] || null);
    fill(row, cells(item));
  });
  while (body.rows.length > rows.length) body.lastElementChild.remove();
}

export function tile(name, value, kind, more) {
  const parts = [element("dt", "", name), element("dd", kind, value)];
  if (more) parts.push(element("dd", "small", more));
  return element("div", "", ...parts);
}

// Returns the values that a rule compared, each of which stays on one line, and the sentences behind a decision.
export const reasons = (parts) => element("div", "", ...parts.flatMap((text, i) => [i ? ", " : "",
  text.length > SENTENCE ? element("div", "text", text) : element("span", "comparison", text)]));
