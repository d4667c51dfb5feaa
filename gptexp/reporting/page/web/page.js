"use strict";
// `vegaEmbed` is defined by the bundle before this script. PAGE: {figures, themes, end_labels, live}.
const PAGE = JSON.parse(document.getElementById("page-data").textContent);
const DARK = matchMedia("screen and (prefers-color-scheme: dark)"), NARROW = matchMedia("(max-width: 40rem)");
const OPTIONS = {renderer: "svg", actions: {export: true, source: false, compiled: false, editor: false}};
const views = new Map();  // id of a plot's element -> {figure, look, form, view, finalize}
const chosen = new Map();  // key of a figure -> {control: option}
let figures = PAGE.figures;

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

const layersOf = spec => [spec, ...(spec.layer ?? [])].filter(layer => layer.data);

function specOf({key, spec, controls, on_a_phone}) {
  const patches = controls.map(({label, options}) => options[chosen.get(key)?.[label]] ?? {});
  const drawn = patched(patches.reduce(patched, spec), {config: PAGE.themes[DARK.matches ? "dark" : "light"]});
  if (!NARROW.matches) return drawn;
  const layer = drawn.layer?.filter(({name}) => name !== PAGE.end_labels);
  const narrow = {padding: 5, config: {legend: {columns: 2, layout: {bottom: {direction: "vertical"}}}}, ...layer && {layer}};
  return patched(patched(drawn, narrow), on_a_phone);
}

/** A specification without its data, its description and the values of its parameters, as text. */
const formOf = spec => JSON.stringify({...spec, params: spec.params?.map(({name}) => name), description: ""},
                                      (key, value) => key === "values" ? undefined : value);

/** What a reader has zoomed to and isolated in a chart. */
function stateOf(view) {
  const {zoom} = view.getState({signals: name => name === "zoom"}).signals;  // field -> range
  const ranges = new Set(Object.keys(zoom ?? {}).map(field => `zoom_${field}`));
  return view.getState({signals: name => ranges.has(name), data: name => name.startsWith("isolated")});
}

/** Give a chart what the one in its place had, as far as it has the same axes and legends. */
async function restore(view, old) {
  const own = view.getState({signals: name => name in old.signals, data: name => name in old.data});
  for (const name in own.signals) view.signal(name, old.signals[name]);
  for (const name in own.data) view.data(name, old.data[name]);
  await view.runAsync();
}

/** Draw what has changed and can be seen. A figure of which only the data differ does not flicker; each keeps its zoom. */
async function draw() {
  for (const figure of figures) {
    const id = `plot-${figure.key}`, element = document.getElementById(id), known = views.get(id);
    if (!element || element.closest("details:not([open])")) continue;
    const look = JSON.stringify([DARK.matches, NARROW.matches, chosen.get(figure.key)]);
    const stands = known && element.contains(known.view.container());
    if (stands && known.figure === figure && known.look === look) continue;
    const spec = specOf(figure), form = formOf(spec);
    try {
      if (stands && known.form === form) {
        for (const layer of layersOf(spec)) known.view.data(layer.data.name, layer.data.values);
        for (const {name, value} of spec.params ?? []) known.view.signal(name, value);
        await known.view.description(spec.description).runAsync();
        Object.assign(known, {figure, look});
      } else {
        const state = known && stateOf(known.view);
        known?.finalize();
        views.set(id, {figure, look, form, ...await vegaEmbed(element, spec, OPTIONS)});
        if (state) await restore(views.get(id).view, state);
      }
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
  const text = button.parentElement.querySelector("pre").textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(button.parentElement.querySelector("pre"));
    button.textContent = "Selected";
  }
  setTimeout(() => button.textContent = "Copy", 2000);
}

function choose(button) {
  const control = button.closest("fieldset"), key = button.closest("figure").dataset.key;
  chosen.set(key, {...chosen.get(key), [control.dataset.control]: button.textContent});
  showChoices();
  redraw();
}

function showChoices() {
  for (const control of document.querySelectorAll("fieldset[data-control]")) {
    const option = chosen.get(control.closest("figure").dataset.key)?.[control.dataset.control];
    [...control.querySelectorAll("button")].forEach((button, number) =>
      button.setAttribute("aria-pressed", option === undefined ? number === 0 : button.textContent === option));
  }
}

let sorted = null;  // {key, descending}: the column of the table that orders it

function sortBy(key) {
  sorted = {key, descending: sorted?.key === key && !sorted.descending};
  showOrder();
}

function showOrder() {
  const table = document.querySelector("table.sortable");
  if (!table || !sorted) return;
  const number = [...table.tHead.rows[0].cells].findIndex(cell => cell.dataset.key === sorted.key);
  if (number < 0) return;
  [...table.tHead.rows[0].cells].forEach((cell, other) => {
    if (other === number) cell.setAttribute("aria-sort", sorted.descending ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  });
  const value = body => body.rows[0].cells[number].dataset.value;
  const compare = (one, other) => {
    if (value(one) === "" || value(other) === "") return (value(one) === "") - (value(other) === "");  // empty ones last
    const order = isNaN(value(one)) || isNaN(value(other))
      ? value(one).localeCompare(value(other)) : value(one) - value(other);
    return sorted.descending ? -order : order;
  };
  const order = [...table.tBodies].sort(compare);
  if (order.some((body, at) => body !== table.tBodies[at])) table.append(...order);  // a move takes the focus away
}

let sought = new URLSearchParams(location.search).get("filter") ?? "";  // the text that rows of the index must hold

/** Show the rows of the index that hold all words of `sought`. */
function showFiltered() {
  const filter = document.getElementById("filter");
  if (!filter) return;
  if (filter.value !== sought) filter.value = sought;
  const words = sought.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = [...document.querySelector("table.index").tBodies];
  for (const row of rows) row.hidden = !words.every(word => row.dataset.foundBy.includes(word));
  const shown = rows.filter(row => !row.hidden).length;
  document.getElementById("filtered").textContent = words.length ? `${shown} of ${rows.length} shown` : "";
}

/** Filter, and keep the text in the address, for a reload. */
function filterBy(text) {
  sought = text;
  const address = new URL(location);
  if (text) address.searchParams.set("filter", text);
  else address.searchParams.delete("filter");
  history.replaceState(null, "", address);
  showFiltered();
}

const opened = new Set();  // ids of the runs whose details are shown

function toggle(body, open = !opened.has(body.id)) {
  if (open) opened.add(body.id);
  else opened.delete(body.id);
  body.rows[1].hidden = !open;
  body.querySelector(".opens")?.setAttribute("aria-expanded", open);
}

function openTarget() {
  const body = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (body?.tagName !== "TBODY") return;
  toggle(body, true);
  body.scrollIntoView({block: "center"});
  history.replaceState(null, "", location.pathname + location.search);  // so that the same link works again
}

document.addEventListener("click", event => {
  const button = event.target.closest("button");
  const row = event.target.closest(".sortable tbody tr:first-child");
  const marked = getSelection();
  if (button?.classList.contains("copy")) copy(button);
  else if (button?.closest("fieldset[data-control]")) choose(button);
  else if (button?.closest("thead")) sortBy(button.closest("th").dataset.key);
  else if (button?.classList.contains("opens")) toggle(row.parentElement);
  else if (row?.nextElementSibling && !event.target.closest("a") && (marked.isCollapsed || !row.contains(marked.anchorNode)))
    toggle(row.parentElement);
});
document.addEventListener("input", event => event.target.id === "filter" && filterBy(event.target.value));
document.addEventListener("toggle", event => event.target.id === "diagnostics" && redraw(), true);
DARK.addEventListener("change", redraw);
NARROW.addEventListener("change", redraw);
addEventListener("hashchange", openTarget);

// --- Where the content comes from

const KEPT = new Set(["open", "hidden", "aria-expanded", "aria-pressed", "aria-sort"]);  // what the reader has chosen

/** Make an element equal to another, and touch only what differs: focus, selection, scrolling and zoom stay. */
function update(element, fresh) {
  if ("unchanged" in fresh.dataset) return;
  if (element.classList.contains("plot")) return;  // Vega owns what is in a plot, and adds classes to it
  for (const {name, value} of fresh.attributes)
    if (!KEPT.has(name) && element.getAttribute(name) !== value) element.setAttribute(name, value);
  updateChildren(element, fresh);
}

/** Children with an id are found by it, wherever the reader has sorted them to; others by their place. */
function updateChildren(element, fresh) {
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

/** Show new sections. What the reader has opened or sorted stays so. */
function show(sections) {
  for (const [name, html] of Object.entries(sections)) {
    const fresh = document.createElement("template");
    fresh.innerHTML = html;  // gptexp has escaped all names and texts, and the policy runs no script of theirs
    updateChildren(document.getElementById(name), fresh.content);
  }
  for (const id of opened) {
    const body = document.getElementById(id);
    if (body) toggle(body, true);
  }
  showOrder();
  showFiltered();
  showChoices();
  for (const [id, {finalize}] of views)
    if (!document.getElementById(id)) { finalize(); views.delete(id); }
}

let version = "", changed = null;  // of the content that is shown; Unix time of the newest change in the files, in s

function ago(seconds) {
  const [unit, size] = seconds < 100 ? ["s", 1] : seconds < 6000 ? ["min", 60] : seconds < 172800 ? ["h", 3600] : ["days", 86400];
  return `${Math.max(0, Math.round(seconds / size))} ${unit} ago`;
}

class Gone extends Error {}

async function poll() {
  const state = document.getElementById("state");
  try {
    const response = await fetch(`state.json?have=${version}`, {signal: AbortSignal.timeout(PAGE.live.patience_ms)});
    if (response.status === 404) throw new Gone("This run is no longer here.");
    if (!response.ok) throw new Error(response.statusText);
    if (response.status !== 204) {
      const news = await response.json(), isFirst = version === "";  // only what differs from `version`
      const drawn = new Map(figures.map(figure => [figure.key, figure]));
      figures = news.figures.map(figure => figure.spec ? figure : drawn.get(figure.key));
      document.title = news.title;
      show(news.sections);
      ({version, changed} = news);
      await redraw();
      if (isFirst) openTarget();
    }
    state.className = "";
    state.textContent = changed === null ? "" : `updated ${ago(Date.now() / 1000 - changed)}`;
  } catch (error) {
    state.className = "lost";
    state.textContent = error instanceof Gone
      ? error.message : "gptexp watch does not answer. This is the last state that it sent.";
  }
  setTimeout(poll, PAGE.live.every_ms);
}

if (PAGE.live) poll();
else redraw();
openTarget();
