/** All heads of a model: small heat maps by layer and head, and a sortable list of their statistics. */

import { scale } from "./colours.js";
import { button, element } from "./dom.js";
import { Matrix } from "./maps.js";
import { imageOf } from "./svg.js";

const COLUMNS = [
  ["layer", "Layer", "Index of the layer."],
  ["head", "Head", "Index of the head."],
  ["entropy", "Entropy", "Mean entropy of the rows in bits: 0 if each row attends to one token."],
  ["mean_distance", "Distance", "Mean distance between a token and those that it attends to."],
  ["special_share", "Special", "Share of the weight on special tokens."],
  ["alignment_agreement", "Alignment", "Share of rows whose strongest token is that of the model's alignment."],
];

export class Heads {
  /**
   * @param root element that the view fills
   * @param onChoose called with `(layer, head)` when a head is chosen
   * @param hasList false shows the heat maps only
   */
  constructor(root, onChoose, { hasList = true } = {}) {
    this._root = root;
    this._onChoose = onChoose;
    this._hasList = hasList;
    this._sort = ["layer", 1];
  }

  /**
   * Show all heads of one kind. The first layer is requested at once, the others when they are scrolled
   * into view; the list has those that were.
   */
  show(maps, kind, units, hideSpecial, chosen) {
    this._chosen = chosen;
    this._statistics = [];
    this._observer?.disconnect();
    const { layers, heads } = maps.kind(kind);
    const grid = element("div", { className: "heads" });
    this._list = element("div", { className: "scroller" });
    this._root.replaceChildren(grid, this._list);
    this._observer = new IntersectionObserver(entries => {
      for (const { isIntersecting, target } of entries)
        if (isIntersecting) {
          this._observer.unobserve(target);
          this._fill(target, maps, kind, units, Number(target.dataset.layer), hideSpecial);
        }
    }, { rootMargin: "300px" });
    for (let layer = 0; layer < layers; layer++) {
      const line = element("div", { className: "layer", "data-layer": layer }, element("span", { textContent: `Layer ${layer}`, className: "name" }));
      for (let head = 0; head < heads; head++) line.append(this._button(layer, head));
      grid.append(line);
      if (layer === 0) this._fill(line, maps, kind, units, layer, hideSpecial);
      else this._observer.observe(line);
    }
  }

  _button(layer, head) {
    const name = `Layer ${layer}, head ${head}`;
    const ariaPressed = String(layer === this._chosen[0] && head === this._chosen[1]);
    return button("", () => this._onChoose(layer, head), { title: name, ariaLabel: name, ariaPressed, "data-head": head });
  }

  async _fill(line, maps, kind, units, layer, hideSpecial) {
    let one;
    try {
      one = await maps.layer(kind, units, layer);
    } catch (error) {
      line.append(element("span", { className: "error", textContent: error.message }));
      return;
    }
    one.heads.forEach((data, head) => {
      let matrix = new Matrix(one.rows, one.columns, data, "");
      if (hideSpecial) matrix = matrix.withoutSpecial();
      const canvas = imageOf(matrix, scale(matrix.maximum));
      canvas.setAttribute("aria-hidden", "true");
      line.querySelector(`[data-head="${head}"]`).replaceChildren(canvas);
    });
    this._statistics.push(...one.statistics);
    if (this._hasList) this._list.replaceChildren(this._table());
  }

  _table() {
    const [key, direction] = this._sort;
    const columns = COLUMNS.filter(([name]) => this._statistics.some(one => one[name] !== null && one[name] !== undefined));
    const table = element("table", { className: "statistics" });
    table.createCaption().textContent = "Heads; click a column to sort, a row to open the head.";
    const head = table.createTHead().insertRow();
    for (const [name, title, help] of columns) {
      const ariaSort = name === key ? (direction > 0 ? "ascending" : "descending") : "none";
      const sort = () => {
        this._sort = [name, name === key ? -direction : name === "layer" || name === "head" ? 1 : -1];
        this._list.replaceChildren(this._table());
      };
      head.append(element("th", { scope: "col", ariaSort }, button(title, sort, { title: help })));
    }
    const order = (first, second) => direction * ((first[key] ?? -1) - (second[key] ?? -1)) || first.layer - second.layer || first.head - second.head;
    const body = table.createTBody();
    for (const one of [...this._statistics].sort(order)) {
      const line = body.insertRow();
      const isChosen = one.layer === this._chosen[0] && one.head === this._chosen[1];
      line.classList.toggle("current", isChosen);
      columns.forEach(([name], index) => {
        const cell = line.insertCell();
        const text = one[name] === null || one[name] === undefined ? "–" : Number.isInteger(one[name]) && index < 2 ? String(one[name]) : one[name].toFixed(2);
        cell.append(index === 1 ? button(text, () => this._onChoose(one.layer, one.head), { ariaLabel: `Open head ${text} of layer ${one.layer}` }) : text);
      });
    }
    return table;
  }
}
