/** The page: a translator; and one or two sides, the view of their attention, and its export. */

import { request } from "./api.js";
import { Alignment } from "./alignment.js";
import { button, element, errorBox, field, select } from "./dom.js";
import { Heads } from "./heads.js";
import { HeatMap, tableOf } from "./heatmap.js";
import { KIND_NAMES, Matrix, METHODS } from "./maps.js";
import { bars, Panel } from "./panel.js";
import { DEFAULTS, fromFragment, isDamaged, side, toFragment } from "./state.js";
import * as svg from "./svg.js";
import { Translator, translates } from "./translator.js";
import { copy, csvOf, jsonOf, linkOf, pngOf, save, snippetOf } from "./exports.js";

const VIEWS = { alignment: "Alignment", heatmap: "Heat map", heads: "All heads", table: "Table" };
const FORMULAS = {
  words:
    "Subwords are merged to words: the attention to a word is the sum over its tokens, the attention from a word is the mean over its tokens (Clark et al. 2019).",
  special: "Rows and columns of special tokens, such as </s>, are hidden. The weights that remain are not rescaled.",
  rollout:
    "Attention rollout (Abnar and Zuidema 2020): the product over the layers of (A + I) / 2, with A the mean over the heads. Cross-attention is multiplied by the rollout of the encoder.",
  norms: "Norms (Kobayashi et al. 2020): the length of the vector that the head takes from each token.",
  value_zeroing: "Value zeroing (Mohebbi et al. 2023): how much the output of the layer turns without the value of a token. Rows sum to 1.",
  alti: "ALTI+ (Ferrando et al. 2022): the share of each token of the input and of the text so far in the output of the layer.",
};
const RETRY_MS = 1500;

const byId = id => document.getElementById(id);
let state = fromFragment(location.hash) ?? structuredClone(DEFAULTS);
let cards = [];
let panels = [];
let shown = []; // matrices in the view
let views = []; // components that show them
let numViews = 0;
let translator = null; // null if no model translates
let lookInside = "#attention"; // fragment of the link from the translator to the attention of its text
const isEmbedded = new URLSearchParams(location.search).has("embed");

/** Wait for the models of the service, and build the page. */
async function start() {
  document.body.classList.toggle("embedded", isEmbedded);
  try {
    cards = (await request("/v1/models")).data;
  } catch (error) {
    byId("notice").replaceChildren(element("p", { textContent: `${error.message} The page tries again by itself.` }));
    setTimeout(start, RETRY_MS);
    return;
  }
  if (!cards.length) {
    byId("notice").replaceChildren(element("p", { textContent: "No model is served. See the log of the service." }));
    return;
  }
  byId("notice").replaceChildren();
  if (isDamaged(location.hash)) showDamage("the default model with an example");
  const { default_model: first, default_models: { generate } } = await request("/");
  const rank = ({ id }) => (id === first ? 0 : id === generate ? 1 : 2);
  cards.sort((one, other) => rank(one) - rank(other));
  if (cards.some(translates)) translator = new Translator(byId("translator"), cards, changeLink);
  state.a.model ??= cards[0].id;
  showView();
}

/** Show the translator at an address without a fragment, and else what is inside of the models. */
function showView() {
  const isTranslator = translator !== null && !isEmbedded && location.hash.length < 2;
  byId("translator").hidden = !isTranslator;
  byId("inside").hidden = byId("compare").hidden = isTranslator;
  byId("purpose").textContent = isTranslator ? "Translate texts and documents." : "See the attention of a served model.";
  byId("other-view").hidden = !translator;
  byId("other-view").textContent = isTranslator ? "Look inside" : "Translate";
  changeLink(lookInside);
  if (!isTranslator && !panels.length) build();
}

function changeLink(fragment) {
  lookInside = fragment;
  byId("other-view").href = byId("translator").hidden ? "#" : lookInside;
}

/** Build the sides from the state, and run their models. */
function build() {
  const sides = state.b ? [state.a, state.b] : [state.a];
  byId("sides").replaceChildren();
  byId("sides").classList.toggle("two", sides.length > 1);
  panels = sides.map((one, index) => {
    const root = element("section", { className: "side", "aria-label": sides.length > 1 ? `Side ${"AB"[index]}` : "Input and output" });
    byId("sides").append(root);
    const missing = cards.some(({ id }) => id === one.model) ? null : one.model;
    if (missing) Object.assign(one, side({ input: one.input, model: cards[0].id }));
    const panel = new Panel(root, cards, one, { changed: saveState, show, hover: hoverOutput, wait, edited, run: runSides });
    if (missing) root.prepend(element("p", { className: "error", role: "alert", textContent: `This link is about the model ${missing}, which is not served here. Its text is shown with ${one.model}.` }));
    return panel;
  });
  if (state.b) byId("sides").prepend(sharing());
  const compare = byId("compare");
  compare.textContent = state.b ? "End the comparison" : "Compare";
  compare.ariaPressed = String(Boolean(state.b));
  for (const panel of panels) panel.run();
}

/** Return the choice whether both sides have one text. */
function sharing() {
  state.isShared ??= state.a.input === state.b.input;
  const box = element("input", { type: "checkbox", checked: state.isShared });
  box.addEventListener("change", () => {
    state.isShared = box.checked;
    if (box.checked) edited(panels[0]);
    saveState();
  });
  return field("One text for both sides", box);
}

const sharingSides = () => (state.b && state.isShared && panels[0].mode === panels[1].mode ? panels : []);

/** Copy the text that was edited on one side to the other. */
function edited(panel) {
  for (const other of sharingSides()) if (other !== panel) other.take(panel.side.input);
}

/** Run a side, and the other one if it has the same text. */
function runSides(panel) {
  for (const one of new Set([panel, ...sharingSides()])) one.run();
}

/** Say that a link is damaged, and what the page shows instead of its view. */
function showDamage(shown) {
  const text = `The link is damaged or incomplete. The page shows ${shown} instead. Copy the whole link and open it again.`;
  byId("notice").replaceChildren(element("p", { textContent: text }), button("Close", () => byId("notice").replaceChildren()));
}

function saveState() {
  history.replaceState(null, "", `${location.pathname}${location.search}${toFragment(state)}`);
}

/** Change the state of the view, and show it. */
function change(values) {
  Object.assign(state, values);
  saveState();
  show();
}

/** The kind, layer and head that are shown: those of the state, or defaults that fit the models. */
function selection(panel) {
  const { kinds } = panel.maps;
  const order = ["cross", "encoder", "decoder", "encoder_slots"];
  const kind = kinds.find(one => one.kind === state.kind) ?? order.map(name => panel.maps.kind(name)).find(Boolean);
  // Rows are steps that write, so that heads that align words at the step that reads are no default.
  const alignment = kind.kind === "cross" && panel.card.alignment?.step === "writes" ? panel.card.alignment : null;
  const layer = Math.min(state.layer ?? alignment?.layer ?? kind.layers - 1, kind.layers - 1);
  const given = state.head ?? (alignment?.heads.length === 1 && layer === alignment.layer ? alignment.heads[0] : "mean");
  const head = typeof given === "number" ? Math.min(given, kind.heads - 1) : given;
  return { kind, layer, head: head === "rollout" && !kind.canRollOut ? "mean" : head };
}

/** Mark the view as out of date until it is drawn again. */
function wait() {
  byId("view").ariaBusy = "true";
}

/** Draw the view of all sides whose output is there. */
async function show() {
  wait();
  const number = ++numViews;
  await drawView(() => number === numViews);
  if (number === numViews) byId("view").ariaBusy = String(panels.some(panel => panel.isRunning));
}

/** @param isCurrent returns false once a later view replaces this one */
async function drawView(isCurrent) {
  const ready = panels.filter(panel => panel.maps);
  const view = byId("view");
  byId("attention").hidden = panels.every(panel => !panel.outputs);
  if (!ready.length) {
    byId("toolbar").replaceChildren();
    const isWithout = panels.some(panel => panel.outputs && !panel.card.attention.length);
    view.replaceChildren(element("p", { textContent: isWithout ? "This model has no attention: it reads its input as one vector of fixed size." : "" }));
    return;
  }
  buildToolbar(ready);
  const units = state.words ? "words" : "tokens";
  if (state.view === "heads") return showHeads(ready, units);
  const choices = ready.map(panel => ({ panel, ...selection(panel) }));
  try {
    const matrices = await Promise.all(choices.map(async ({ panel, kind, layer, head }) => {
      const matrix = await panel.maps.matrix(kind.kind, units, layer, head);
      matrix.title = `${panel.card.id}: ${matrix.title}${kind.method === "weights" ? "" : `, ${METHODS[kind.method]}`}`;
      return state.hideSpecial ? matrix.withoutSpecial() : matrix;
    }));
    if (!isCurrent()) return;
    shown = matrices;
    draw(choices);
  } catch (error) {
    if (!isCurrent()) return;
    view.replaceChildren(errorBox(error, show));
  }
}

function draw(choices) {
  const figures = shown.map((matrix, index) => {
    const place = element("div");
    const { panel, kind } = choices[index];
    const shares = panel.messages ? messageShares(matrix, panel.messages) : "";
    return [element("figure", {}, element("figcaption", { textContent: matrix.title }), place, element("p", { className: "hint", textContent: noteOf(kind, choices[index].head, matrix) }), shares), place, matrix];
  });
  if (shown.length === 2 && shown[0].hasLabelsOf(shown[1])) {
    const place = element("div");
    const difference = shown[0].minus(shown[1]);
    figures.push([element("figure", {}, element("figcaption", { textContent: `Difference: blue where ${shown[0].title} is larger, orange where ${shown[1].title} is` }), place), place, difference, true]);
  } else if (shown.length === 2) figures.push([withoutDifference()]);
  const view = byId("view");
  view.replaceChildren(...figures.map(([figure]) => figure));
  view.className = figures.length > 1 ? "views several" : "views with-heads";
  if (figures.length === 1) view.append(navigator(choices[0]));
  views = [];
  for (const [, place, matrix, isDifference] of figures) {
    if (!place) continue;
    const onHover = cell => hover(cell, matrix);
    if (!matrix.rows.length || !matrix.columns.length) place.append("No tokens are left; show the special tokens.");
    else if (state.view === "table") place.append(element("div", { className: "scroller", tabIndex: 0 }, tableOf(matrix) ?? "The map is too large for a table; take its numbers away as CSV."));
    else {
      const isMap = state.view === "heatmap" || isDifference;
      const component = isMap ? new HeatMap(place, onHover, { isDifference }) : new Alignment(place, onHover);
      component.show(matrix);
      component.highlight(null);
      views.push(component);
    }
  }
}

/**
 * Return the mean attention of the words of a reply to each message of its dialogue, as bars.
 *
 * The messages are found in the columns by their texts, one after another.
 */
function messageShares(matrix, messages) {
  const without = text => text.replace(/\s+/gu, "");
  const starts = [];
  let joined = "";
  for (const { text } of matrix.columns) {
    starts.push(joined.length);
    joined += without(text);
  }
  const rows = [...matrix.rows.keys()].filter(row => matrix.rows[row].offsets?.length);
  let position = 0;
  const shares = [];
  for (const { role, content } of messages) {
    const start = joined.indexOf(without(content), position);
    if (start < 0) continue;
    position = start + without(content).length;
    const columns = [...starts.keys()].filter(column => starts[column] >= start && starts[column] < position);
    const sum = rows.reduce((total, row) => total + columns.reduce((one, column) => one + matrix.weight(row, column), 0), 0);
    shares.push([`${role}: ${content.length > 60 ? `${content.slice(0, 60)}…` : content}`, sum / Math.max(1, rows.length)]);
  }
  return shares.length
    ? element("div", { className: "shares" }, element("h3", { textContent: "Attention of the reply to each message" }), bars(shares))
    : "";
}

/** Say why there is no map of the difference, and offer to make the outputs equal. */
function withoutDifference() {
  const [first, second] = panels;
  const text = first.shownText;
  const canForce = first.mode === "translate" && second.mode === "translate" && text && first.side.input === second.side.input;
  return element("div", { className: "hint" },
    element("p", { textContent: "A map of the difference needs the same tokens on both sides." }),
    canForce ? button("Let both models read the first output", () => {
      Object.assign(second.side, { forced: text, sentence: first.side.sentence });
      second.run();
    }) : "");
}

/** Return small maps of all heads, beside the view of one of them. */
function navigator({ panel, kind, layer, head }) {
  const place = element("div", { className: "navigator" });
  const heads = new Heads(place, (chosenLayer, chosenHead) => change({ layer: chosenLayer, head: chosenHead, kind: kind.kind }), { hasList: false });
  heads.show(panel.maps, kind.kind, state.words ? "words" : "tokens", state.hideSpecial, [layer, head]);
  return element("figure", { "aria-label": "All heads" }, element("figcaption", { textContent: "All heads" }), place);
}

/** Return a sentence on what is particular to a kind of attention. */
function noteOf(kind, head, matrix) {
  if (kind.method !== "weights") return FORMULAS[kind.method];
  const notes = matrix.isHard ? ["Each row attends to a single token, as with hard attention."] : [];
  const isOfOne = kind.normalized && kind.window === null && (head === "mean" || typeof head === "number"); // rows sum to 1
  const hidden = isOfOne ? 1 - matrix.data.reduce((sum, weight) => sum + weight, 0) / matrix.rows.length : 0;
  if (hidden > 0.5) notes.push(`${Math.round(100 * hidden)} % of the weight is on special tokens. To see them, show them and do not merge to whole words.`);
  if (head === "rollout") notes.push(FORMULAS.rollout);
  if (kind.window?.centre === "predicted") notes.push(`Local attention: the decoder predicts a position and attends to ${kind.window.radius} tokens on both sides of it; weights are scaled by a Gaussian and do not sum to 1.`);
  if (kind.window?.centre === "monotonic") notes.push(`Local attention: row i attends to the columns i − ${kind.window.radius} to i + ${kind.window.radius} only.`);
  if (kind.kind === "encoder_slots") notes.push("Linformer: the columns are projected keys, each a fixed mixture of all tokens.");
  if (kind.kind === "encoder" && !kind.normalized) notes.push("Linformer: the attention to the projected keys, projected back to tokens; weights may be negative.");
  return notes.join(" ");
}

async function showHeads(ready, units) {
  shown = [];
  views = [];
  const figures = ready.map(panel => {
    const { kind, layer, head } = selection(panel);
    const place = element("div");
    new Heads(place, (chosenLayer, chosenHead) => change({ layer: chosenLayer, head: chosenHead, view: "heatmap", kind: kind.kind }))
      .show(panel.maps, kind.kind, units, state.hideSpecial, [layer, head]);
    return element("figure", {}, element("figcaption", { textContent: `${panel.card.id}: ${KIND_NAMES[kind.kind]}, all heads; each with its own scale` }), place);
  });
  byId("view").className = "views several";
  byId("view").replaceChildren(...figures);
}

/** @param ready one side, or two that are compared: then the controls are for both */
function buildToolbar(ready) {
  const [panel] = ready;
  const sides = ready.map(selection);
  const [{ kind }] = sides;
  const tabs = element("div", { role: "group", className: "tabs", "aria-label": "View" },
    ...Object.entries(VIEWS).map(([name, title]) => button(title, () => change({ view: name }), { ariaPressed: String(state.view === name) })));
  const indices = count => Array.from({ length: count }, (_, index) => [String(index), String(index)]);
  const combined = [["mean", "mean"], ["max", "max"], ...(kind.canRollOut ? [["rollout", "rollout"]] : [])];
  const check = (text, key, help) => {
    const box = element("input", { type: "checkbox", checked: state[key] });
    box.addEventListener("change", () => change({ [key]: box.checked }));
    return field(text, box, help);
  };
  const focused = document.activeElement?.dataset?.control;
  const selectOf = (name, options, value, onChange) => {
    const made = select(options, value, onChange);
    made.dataset.control = name;
    return made;
  };
  const ofSides = name => (sides.length > 1 ? `${name} of both sides` : name);
  // Without a choice, each side has the layer and head that fit its model.
  const choice = (name, options) => {
    const isShared = sides.every(side => side[name] === sides[0][name]);
    const all = isShared ? options : [["", "each its own"], ...options];
    return selectOf(name, all, isShared ? String(sides[0][name]) : "", value =>
      change({ [name]: value === "" ? null : Number.isNaN(Number(value)) ? value : Number(value) }));
  };
  byId("toolbar").replaceChildren(tabs,
    field("Kind", selectOf("kind", panel.maps.kinds.map(one => [one.kind, KIND_NAMES[one.kind]]), kind.kind, value => change({ kind: value, layer: null, head: null }))),
    ...(state.view === "heads" ? [] : [
      field(ofSides("Layer"), choice("layer", indices(kind.layers))),
      field(ofSides("Head"), choice("head", [...indices(kind.heads), ...combined]), FORMULAS.rollout),
    ]),
    check("Whole words", "words", FORMULAS.words),
    check("Hide special tokens", "hideSpecial", FORMULAS.special),
    exportMenu());
  if (focused) byId("toolbar").querySelector(`[data-control="${focused}"]`)?.focus();
}

// Linked highlighting

/**
 * Highlight a cell in all views: in the view that it comes from by its indices, in others by the texts of
 * its tokens.
 *
 * @param cell `[row, column]`, each of them null for a whole row or column; or `null`
 * @param matrix matrix that the cell belongs to
 */
function hover(cell, matrix) {
  for (const view of views)
    view.highlight(cell && view.matrix !== matrix ? counterpart(cell, matrix, view.matrix) : cell);
}

/** Return the cell of another matrix with the same tokens. */
function counterpart([row, column], from, to) {
  const find = (index, labels, others) => {
    if (index === null || others[index]?.text === labels[index].text) return index;
    const same = [...others.keys()].filter(one => others[one].text === labels[index].text);
    return same.sort((first, second) => Math.abs(first - index) - Math.abs(second - index))[0] ?? null;
  };
  const cell = [find(row, from.rows, to.rows), find(column, from.columns, to.columns)];
  return cell[0] === null && cell[1] === null ? null : cell;
}

/** Highlight the row of a token of a side's output, given the index of its first character; or `null`. */
function hoverOutput(start, panel) {
  const index = panels.filter(one => one.maps).indexOf(panel);
  const matrix = shown[index];
  if (!matrix || start === null) return hover(null, null);
  const row = matrix.rows.findIndex(({ offsets }) => offsets?.length && offsets[0] <= start && start < offsets[1]);
  hover(row < 0 ? null : [row, null], matrix);
}

// Export

function exportMenu() {
  const isGrid = () => state.view === "heads";
  const name = () => `attention-${panels[0].card.id}-${state.view}`;
  const items = element("div", { className: "menu" },
    button("SVG", async () => save(`${name()}.svg`, await pictureOf(), "image/svg+xml")),
    button("PNG", async () => save(`${name()}.png`, await pngOf(await pictureOf()))),
    button("CSV", () => save(`${name()}.csv`, csvOf(shown), "text/csv"), { disabled: isGrid() }),
    button("JSON", () => save(`${name()}.json`, jsonOf(shown, state, panels.map(panel => panel.outputs)), "application/json")),
    button("Link", () => offer(linkOf(state), "The link is copied.")),
    button("Embed", () => offer(snippetOf(state), "The snippet is copied. The setting SIGHTLINE_FRAME_ANCESTORS must name the site that shows it.")));
  return element("details", { className: "export" }, element("summary", { textContent: "Export" }), items);
}

async function offer(text, message) {
  const isCopied = await copy(text);
  const area = element("textarea", { value: text, readOnly: true, rows: 2, ariaLabel: "Text to copy" });
  byId("notice").replaceChildren(element("p", { textContent: isCopied ? message : "Copy this text:" }), area, button("Close", () => byId("notice").replaceChildren()));
  area.select();
}

/** Return the view as SVG in the light theme, which prints well. */
async function pictureOf() {
  if (state.view !== "heads") {
    const draw = state.view === "alignment" ? svg.alignment : svg.heatMap;
    return stack(shown.map(matrix => draw(matrix)));
  }
  const units = state.words ? "words" : "tokens";
  const pictures = panels.filter(panel => panel.maps).map(async panel => {
    const { kind } = selection(panel);
    const layers = [];
    for (let layer = 0; layer < kind.layers; layer++) {
      const one = await panel.maps.layer(kind.kind, units, layer);
      const matrices = one.heads.map(data => new Matrix(one.rows, one.columns, data, ""));
      layers.push([layer, state.hideSpecial ? matrices.map(matrix => matrix.withoutSpecial()) : matrices]);
    }
    return svg.grid(layers, { title: `${panel.card.id}: ${KIND_NAMES[kind.kind]}` });
  });
  return stack(await Promise.all(pictures));
}

/** Return SVG pictures below each other as one. */
function stack(pictures) {
  if (pictures.length === 1) return pictures[0];
  const sizes = pictures.map(text => /width="(\d+)" height="(\d+)"/.exec(text).slice(1).map(Number));
  const width = Math.max(...sizes.map(([one]) => one));
  const height = sizes.reduce((sum, [, one]) => sum + one, 0);
  let y = 0;
  const placed = pictures.map((text, index) => {
    const moved = text.replace("<svg ", `<svg y="${y}" `);
    y += sizes[index][1];
    return moved;
  });
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}"><rect width="${width}" height="${height}" fill="#fff"/>${placed.join("")}</svg>`;
}

byId("compare").addEventListener("click", () => {
  state.isShared = null;
  state.b = state.b ? null : side({ ...structuredClone(state.a), model: otherModel() });
  saveState();
  build();
});

/** Return a model to compare with: another one with the same kind of attention, if there is one. */
function otherModel() {
  const current = panels[0].card;
  const sameTask = card => card.id !== current.id && card.attention.length && card.tasks.includes(current.tasks[0]) && card.chat === current.chat;
  return (cards.find(sameTask) ?? current).id;
}

addEventListener("hashchange", () => {
  if (isDamaged(location.hash)) showDamage("the previous view");
  const given = fromFragment(location.hash);
  if (given && toFragment(given) !== toFragment(state)) {
    state = given;
    state.a.model ??= cards[0].id;
    panels = [];
  }
  showView();
});

start();
