"use strict";
// `vegaEmbed` is defined by the bundle before this script. PAGE: {figures, themes, live}.
const PAGE = JSON.parse(document.getElementById("page-data").textContent);
const DARK = matchMedia("(prefers-color-scheme: dark)");
const OPTIONS = {renderer: "svg", actions: {export: true, source: false, compiled: false, editor: false}};
const views = new Map();  // id of a plot's element -> {form, view, finalize}
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

function specOf({key, spec, controls}) {
  const patches = controls.map(({label, options}) => options[chosen.get(key)?.[label]] ?? {});
  return patched(patches.reduce(patched, spec), {config: PAGE.themes[DARK.matches ? "dark" : "light"]});
}

/** A specification without its data and the values of its parameters, as text. */
const formOf = spec => JSON.stringify({...spec, params: spec.params?.map(({name}) => name)},
                                      (key, value) => key === "values" ? undefined : value);

/** Draw all figures that can be seen. One of which only the data have changed keeps its zoom and does not flicker. */
async function draw() {
  for (const figure of figures) {
    const id = `plot-${figure.key}`, element = document.getElementById(id), known = views.get(id);
    if (!element || element.closest("details:not([open])")) continue;
    const spec = specOf(figure), form = formOf(spec);
    try {
      if (known?.form === form && element.contains(known.view.container())) {
        for (const layer of layersOf(spec)) known.view.data(layer.data.name, layer.data.values);
        for (const {name, value} of spec.params ?? []) known.view.signal(name, value);
        await known.view.runAsync();
      } else {
        known?.finalize();
        views.set(id, {form, ...await vegaEmbed(element, spec, OPTIONS)});
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

let sorted = null;  // {column, descending} of the table of runs

function sortBy(column) {
  sorted = {column, descending: sorted?.column === column && !sorted.descending};
  showOrder();
}

function showOrder() {
  const table = document.querySelector("table.sortable");
  if (!table || !sorted) return;
  const number = [...table.tHead.rows[0].cells].findIndex(cell => cell.textContent.trim() === sorted.column);
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
  table.append(...[...table.tBodies].sort(compare));
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
}

document.addEventListener("click", event => {
  const button = event.target.closest("button");
  const row = event.target.closest("tbody tr:first-child");
  if (button?.classList.contains("copy")) copy(button);
  else if (button?.closest("fieldset[data-control]")) choose(button);
  else if (button?.closest("thead")) sortBy(button.textContent.trim());
  else if (row?.nextElementSibling && getSelection().isCollapsed) toggle(row.parentElement);
});
document.addEventListener("toggle", redraw, true);
DARK.addEventListener("change", redraw);
addEventListener("hashchange", openTarget);

// --- Where the content comes from

/** Show new sections. What the reader has opened or sorted stays so. */
function show(sections) {
  for (const [name, html] of Object.entries(sections)) {
    const section = document.getElementById(name);
    if (section.shown === html) continue;
    const open = [...section.querySelectorAll("details[open]")].map(details => details.id);
    section.innerHTML = section.shown = html;  // safe: gptexp has escaped all names and texts
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
  }
  for (const id of opened) {
    const body = document.getElementById(id);
    if (body) toggle(body, true);
  }
  showOrder();
  showChoices();
  for (const [id, {finalize}] of views)
    if (!document.getElementById(id)) { finalize(); views.delete(id); }
}

let version = "", updated = null;

async function poll() {
  const state = document.getElementById("state");
  try {
    const response = await fetch(`state.json?have=${version}`, {signal: AbortSignal.timeout(PAGE.live.patience_ms)});
    if (!response.ok) throw new Error(response.statusText);
    if (response.status !== 204) {
      const news = await response.json();
      ({version, figures} = news);
      document.title = news.title;
      updated = Date.now();
      show(news.sections);
      await redraw();
    }
    state.className = "";
    state.textContent = updated === null ? "" : `updated ${Math.round((Date.now() - updated) / 1000)} s ago`;
  } catch {
    state.className = "lost";
    state.textContent = "gptexp watch does not answer. This is the last state that it sent.";
  }
  setTimeout(poll, PAGE.live.every_ms);
}

if (PAGE.live) poll();
else redraw();
openTarget();
