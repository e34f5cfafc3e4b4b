/** The alignment view: tokens in two columns, and lines as strong as the attention between them. */

import { isDark } from "./colours.js";
import { element } from "./dom.js";
import { alignment } from "./svg.js";

export class Alignment {
  /**
   * @param root element that the view fills
   * @param onHover called with `(row, column)` where the other index is null, or with `null`
   */
  constructor(root, onHover) {
    this._onHover = onHover;
    this._readout = element("output", { className: "readout" });
    this._picture = element("div", { className: "alignment scroller" });
    root.replaceChildren(this._readout, this._picture);
    for (const type of ["pointerover", "focusin"]) this._picture.addEventListener(type, event => this._enter(event.target));
    for (const type of ["pointerleave", "focusout"]) this._picture.addEventListener(type, () => onHover(null));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.matrix && this.show(this.matrix));
  }

  show(matrix) {
    this.matrix = matrix;
    this._picture.innerHTML = alignment(matrix, {
      theme: isDark() ? "dark" : "light",
      title: false,
      width: this._picture.clientWidth,
    });
    const svg = this._picture.firstElementChild;
    svg.setAttribute("role", "group");
    svg.setAttribute("aria-label", `Alignment: ${matrix.title}`);
    for (const token of this._picture.querySelectorAll(".token")) {
      const isRow = token.dataset.row !== undefined;
      token.setAttribute("tabindex", "0");
      token.setAttribute("role", "img");
      token.setAttribute("aria-label", isRow ? this._describeRow(Number(token.dataset.row)) : this._describeColumn(Number(token.dataset.column)));
    }
    this.highlight(null);
  }

  _enter(target) {
    if (!target.classList?.contains("token")) return;
    const { row, column } = target.dataset;
    this._onHover(row !== undefined ? [Number(row), null] : [null, Number(column)]);
  }

  /** Highlight the lines of a row, of a column, or of both. */
  highlight(cell) {
    const [row, column] = cell ?? [null, null];
    const isChosen = ({ dataset }) =>
      (row === null || dataset.row === undefined || Number(dataset.row) === row) &&
      (column === null || dataset.column === undefined || Number(dataset.column) === column);
    for (const line of this._picture.querySelectorAll("path")) line.classList.toggle("dim", cell !== null && !isChosen(line));
    for (const token of this._picture.querySelectorAll(".token")) {
      const isCurrent = token.dataset.row !== undefined ? Number(token.dataset.row) === row : Number(token.dataset.column) === column;
      token.classList.toggle("current", isCurrent);
    }
    this._readout.textContent =
      row !== null ? this._describeRow(row) : column !== null ? this._describeColumn(column) : "Point at a token, or use the Tab key.";
  }

  _describeRow(row) {
    const { rows, columns } = this.matrix;
    if (row >= rows.length) return "";
    return this._describe(`\u2068${rows[row].text}\u2069 attends to`, columns, column => this.matrix.weight(row, column));
  }

  _describeColumn(column) {
    const { rows, columns } = this.matrix;
    if (column >= columns.length) return "";
    return this._describe(`\u2068${columns[column].text}\u2069 is attended to by`, rows, row => this.matrix.weight(row, column));
  }

  _describe(start, labels, weightOf) {
    const best = labels.map((label, index) => [weightOf(index), label.text]).sort(([first], [second]) => second - first);
    return `${start} ${best.slice(0, 3).map(([weight, text]) => `\u2068${text}\u2069 ${Math.round(100 * weight)} %`).join(", ")}`;
  }
}
