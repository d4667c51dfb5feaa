"use strict";
// `vegaEmbed` is defined by the bundle before this script. PAGE: {figures, themes, end_labels, live}.
const readPage = source => JSON.parse(source.getElementById("page-data").textContent);
let PAGE = readPage(document);
const DARK = matchMedia("screen and (prefers-color-scheme: dark)"), NARROW = matchMedia("(max-width: 40rem)");
const OPTIONS = {renderer: "svg", actions: {export: true, source: false, compiled: false, editor: false}};
const views = new Map();  // id of a plot's element -> {look, view, finalize}

// --- Figures

/** Apply a JSON merge patch (RFC 7396). */
function patched(value, patch) {
  if (patch === null || typeof patch !== "object" || Array.isArray(patch)) return patch;
  const result = value !== null && typeof value === "object" && !Array.isArray(value) ? {...value} : {};
  for (const [key, inner] of Object.entries(patch))
    if (inner === null) delete result[key];
    else result[key] = patched(result[key], inner);
  return result;
}

/** Undo `_packed` of page.py: columns of values become points. */
function unpacked(value) {
  if (Array.isArray(value)) return value.map(unpacked);
  if (!(value instanceof Object)) return value;
  if (!value.columns || value.length === undefined)
    return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, unpacked(inner)]));
  const points = Array.from({length: value.length}, () => ({}));
  for (const [name, column] of Object.entries(value.columns)) {
    const values = column.repeats?.flatMap(([repeated, count]) => Array(count).fill(repeated)) ?? column;
    points.forEach((point, number) => point[name] = values[number]);
  }
  return points;
}

/** A figure's specification as the reader has chosen it; `choices`: the option of each of its controls. */
function specOf({spec, controls, on_a_phone}, choices) {
  const patches = controls.map(({options}, number) => options[choices[number]] ?? {});
  const drawn = patched(patches.reduce(patched, unpacked(spec)), {config: PAGE.themes[DARK.matches ? "dark" : "light"]});
  if (!NARROW.matches) return drawn;
  const layer = drawn.layer?.filter(({name}) => name !== PAGE.end_labels);
  const narrow = {padding: 5, config: {legend: {columns: 2, layout: {bottom: {direction: "vertical"}}}}, ...layer && {layer}};
  return patched(patched(drawn, narrow), on_a_phone);
}

/** Give a chart the zoom and the isolated lines of the one before it, as far as it has the same axes and legends. */
async function takeOver(view, before) {
  const {zoom} = before.getState({signals: name => name === "zoom"}).signals;  // field -> range
  const ranges = new Set(Object.keys(zoom ?? {}).map(field => `zoom_${field}`));
  const old = before.getState({signals: name => ranges.has(name), data: name => name.startsWith("isolated")});
  const own = view.getState({signals: name => name in old.signals, data: name => name in old.data});
  for (const name in own.signals) view.signal(name, old.signals[name]);
  for (const name in own.data) view.data(name, old.data[name]);
  await view.runAsync();
}

/** Draw what has changed and can be seen. */
async function draw() {
  for (const [id, {finalize}] of views)
    if (!document.getElementById(id)) { finalize(); views.delete(id); }
  for (const figure of PAGE.figures) {
    const id = `plot-${figure.key}`, element = document.getElementById(id), known = views.get(id);
    if (element.closest("details:not([open])")) continue;
    const choices = [...element.closest("figure").querySelectorAll("input:checked")].map(input => input.value);
    const look = JSON.stringify([DARK.matches, NARROW.matches, choices, figure]);
    if (known?.look === look && element.contains(known.view.container())) continue;
    try {
      views.set(id, {look, ...await vegaEmbed(element, specOf(figure, choices), OPTIONS)});
      if (known) await takeOver(views.get(id).view, known.view);
      known?.finalize();
    } catch (error) {
      console.error(id, error);
    }
  }
  return [...views.values()];
}

/** Draw after what is being drawn now. */
function redraw() {
  window.drawn = (window.drawn ?? Promise.resolve()).then(draw);
  return window.drawn;
}

// --- What a reader does

async function copy(button) {
  const command = button.parentElement.querySelector("pre");
  try {
    await navigator.clipboard.writeText(command.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(command);
    button.textContent = "Selected";
  }
  setTimeout(() => button.textContent = "Copy", 2000);
}

function sortBy(head) {
  const order = head.ariaSort === "ascending" ? "descending" : "ascending";
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.ariaSort = order;
  showOrder();
}

/** Sort the table by the column that its head names; empty values come last. */
function showOrder() {
  const head = document.querySelector(".sortable th[aria-sort]");
  if (!head) return;
  const table = head.closest("table"), sign = head.ariaSort === "ascending" ? 1 : -1;
  const cell = body => body.rows[0].cells[head.cellIndex];
  const value = body => cell(body).dataset.value ?? cell(body).textContent.trim();
  const compare = (one, other) => isNaN(one) || isNaN(other) ? one.localeCompare(other) : one - other;
  const order = [...table.tBodies].sort((one, other) =>
    (value(one) === "") - (value(other) === "") || sign * compare(value(one), value(other)));
  if (order.some((body, at) => body !== table.tBodies[at])) table.append(...order);  // a move takes the focus away
}

/** Show the rows of the index that hold all words of the filter, which the address keeps for a reload. */
function showFiltered() {
  const filter = document.getElementById("filter"), text = new URLSearchParams(location.search).get("filter") ?? "";
  if (!filter) return;
  if (filter.value !== text) filter.value = text;
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = [...document.querySelector("table.index").tBodies];
  for (const row of rows) row.hidden = !words.every(word => row.dataset.searched.includes(word));
  const shown = rows.filter(row => !row.hidden).length;
  document.getElementById("filtered").textContent = words.length ? `${shown} of ${rows.length} shown` : "";
}

function filterBy(text) {
  const address = new URL(location);
  if (text) address.searchParams.set("filter", text);
  else address.searchParams.delete("filter");
  history.replaceState(null, "", address);
  showFiltered();
}

function toggle(body, open = body.rows[1].hidden) {
  body.rows[1].hidden = !open;
  body.querySelector(".opens").ariaExpanded = open;
}

function openTarget() {
  const body = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (body?.tagName !== "TBODY") return;
  toggle(body, true);
  body.scrollIntoView({block: "center"});
  history.replaceState(null, "", location.pathname + location.search);  // so that the same link works again
}

document.addEventListener("click", event => {
  const button = event.target.closest("button"), row = event.target.closest(".sortable tbody tr:first-child");
  const marked = getSelection();
  if (button?.classList.contains("copy")) copy(button);
  else if (button?.closest("thead")) sortBy(button.closest("th"));
  else if (row?.nextElementSibling && !event.target.closest("a")
           && (button || marked.isCollapsed || !row.contains(marked.anchorNode)))
    toggle(row.parentElement);
});
document.addEventListener("input", event => event.target.id === "filter" && filterBy(event.target.value));
document.addEventListener("change", event => event.target.closest("figure") && redraw());
document.addEventListener("toggle", event => event.target.id === "diagnostics" && redraw(), true);
DARK.addEventListener("change", redraw);
NARROW.addEventListener("change", redraw);
addEventListener("hashchange", openTarget);

// --- A live page takes over what differs in a newer version of itself

const KEPT = new Set(["open", "hidden", "aria-expanded", "aria-sort"]);  // what the reader has chosen

/** Make an element equal to another, and touch only what differs: focus, selection, scrolling and zoom stay. */
function update(element, fresh) {
  if (element.id === "state" || element.classList.contains("plot")) return;  // `poll` and Vega write into these
  for (const {name, value} of fresh.attributes)
    if (!KEPT.has(name) && element.getAttribute(name) !== value) element.setAttribute(name, value);
  for (const {name} of [...element.attributes])
    if (!KEPT.has(name) && !fresh.hasAttribute(name)) element.removeAttribute(name);
  // Children with an id are found by it, wherever the reader has sorted them to; others by their place.
  const named = new Map([...element.children].filter(child => child.id).map(child => [child.id, child]));
  const unnamed = [...element.childNodes].filter(child => !child.id);
  const stay = new Set();
  let before = null;
  for (const wanted of [...fresh.childNodes]) {
    let child = wanted.id ? named.get(wanted.id) : unnamed.shift();
    if (child?.nodeName !== wanted.nodeName) {
      child = wanted;
      before ? before.after(child) : element.prepend(child);
    } else if (child.nodeType === Node.ELEMENT_NODE) update(child, wanted);
    else if (child.data !== wanted.data) child.data = wanted.data;
    stay.add(child);
    before = child;
  }
  for (const child of [...element.childNodes]) if (!stay.has(child)) child.remove();
}

function ago(seconds) {
  const [unit, size] = seconds < 100 ? ["s", 1] : seconds < 6000 ? ["min", 60] : seconds < 172800 ? ["h", 3600] : ["days", 86400];
  return `${Math.max(0, Math.round(seconds / size))} ${unit} ago`;
}

let version = "";  // of the page that is shown

async function poll() {
  let lost = "gptexp watch does not answer. This is the last state that it sent.";
  try {
    const response = await fetch(location.pathname, {
      headers: {"If-None-Match": version}, signal: AbortSignal.timeout(PAGE.live.patience_ms)});
    if (response.ok) {
      const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
      version = response.headers.get("ETag");
      PAGE = readPage(fresh);
      document.title = fresh.title;
      update(document.querySelector("main"), fresh.querySelector("main"));
      showOrder();
      showFiltered();
      await redraw();
    }
    if (response.status === 404) lost = "This run is no longer here.";
    else if (response.ok || response.status === 304) lost = "";
  } catch { /* it does not answer */ }
  const state = document.getElementById("state"), {changed} = PAGE.live;
  state.className = lost && "lost";
  state.textContent = lost || (changed === null ? "" : `updated ${ago(Date.now() / 1000 - changed)}`);
  setTimeout(poll, PAGE.live.every_ms);
}

showFiltered();
redraw();
openTarget();
if (PAGE.live) poll();
