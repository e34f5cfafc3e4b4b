/** A heat map on a canvas: values on hover or by the arrow keys, smooth with 512 × 512 weights. */

import { css, isDark, legend, needsWhite, scale } from "./colours.js";
import { element } from "./dom.js";
import { imageOf } from "./svg.js";

const MAX_CELL = 34;
const MIN_LABELLED_CELL = 15; // pixels; rows and columns of smaller cells are labelled at intervals
const MAX_LABELLED = 64; // tokens; the map of longer texts fits the width instead of scrolling
const MAX_TABLE = 80; // rows or columns of the table for screen readers

export class HeatMap {
  /**
   * @param root element that the map fills
   * @param onHover called with `(row, column)` of the cell under the pointer, or with `null`
   */
  constructor(root, onHover, { isDifference = false } = {}) {
    this._isDifference = isDifference;
    this._onHover = onHover;
    this._canvas = element("canvas", { tabIndex: 0, role: "application" });
    this._scroller = element("div", { className: "scroller" }, this._canvas);
    this._readout = element("output", { className: "readout" });
    this._legend = element("p", { className: "legend" });
    root.replaceChildren(this._readout, this._scroller, this._legend);
    this._cell = null; // highlighted [row, column]
    this._canvas.addEventListener("pointermove", event => this._point(event));
    this._canvas.addEventListener("pointerleave", () => onHover(null));
    this._canvas.addEventListener("keydown", event => this._move(event));
    this._canvas.addEventListener("focus", () => this._cell ?? onHover([0, 0]));
    new ResizeObserver(() => this.matrix && this._draw()).observe(root);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.matrix && this.show(this.matrix));
  }

  show(matrix) {
    this.matrix = matrix;
    this._cell = null;
    this._maximum = matrix.maximum;
    this._colour = scale(this._maximum, { isDifference: this._isDifference });
    this._image = imageOf(matrix, this._colour);
    const { least, most, colours } = legend(this._maximum, { isDifference: this._isDifference });
    const bar = element("span");
    bar.style.background = `linear-gradient(to right, ${colours.join()})`;
    this._legend.replaceChildren(least, bar, most);
    this._canvas.setAttribute("aria-label", `Heat map: ${matrix.title}. ${matrix.rows.length} rows that attend, ` +
      `${matrix.columns.length} columns. Use the arrow keys to read the weights.`);
    this._draw();
  }

  /** Highlight a cell; `null` highlights nothing, and an index of `null` highlights a whole row or column. */
  highlight(cell) {
    this._cell = cell;
    this._readout.textContent = this._text(cell);
    this._draw();
  }

  _text(cell) {
    if (!cell || cell[0] === null || cell[1] === null) {
      const { interval = 1 } = this._shape ?? {};
      const note = interval > 1 ? `One of ${interval} tokens has a label. ` : "";
      return `${note}Point at a cell, or use the arrow keys, to read its tokens and its weight.`;
    }
    const [row, column] = cell;
    const { rows, columns } = this.matrix;
    if (row >= rows.length || column >= columns.length) return "";
    const weight = this.matrix.weight(row, column);
    const value = this._isDifference ? `${weight > 0 ? "+" : ""}${weight.toFixed(4)}` : weight.toFixed(4);
    return `\u2068${rows[row].text}\u2069 → \u2068${columns[column].text}\u2069: ${value}`;
  }

  _layout() {
    const { rows, columns } = this.matrix;
    const context = this._canvas.getContext("2d");
    context.font = FONT;
    const width = this._scroller.clientWidth || 600;
    const longest = labels => Math.max(...labels.map(one => context.measureText(one.text).width), 0);
    const isLabelled = Math.max(rows.length, columns.length) <= MAX_LABELLED;
    const left = Math.min(150, longest(rows)) + 12;
    const top = Math.min(130, longest(columns) * 0.72) + 18;
    const right = Math.min(90, context.measureText(columns.at(-1)?.text ?? "").width * 0.72);
    const fit = (width - left - right - 2) / columns.length;
    const cell = isLabelled ? Math.max(MIN_LABELLED_CELL, Math.min(MAX_CELL, fit)) : Math.min(8, fit);
    return { left, top, right, cell, interval: Math.max(1, Math.ceil(MIN_LABELLED_CELL / cell)) };
  }

  _draw() {
    const { rows, columns } = this.matrix;
    if (!rows.length || !columns.length) return;
    const { left, top, right, cell, interval } = (this._shape = this._layout());
    const [width, height] = [left + columns.length * cell + right, top + rows.length * cell + 4];
    const ratio = devicePixelRatio || 1;
    this._canvas.width = Math.ceil(width * ratio);
    this._canvas.height = Math.ceil(height * ratio);
    this._canvas.style.width = `${width}px`;
    this._canvas.style.height = `${height}px`;
    const context = this._canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.imageSmoothingEnabled = false;
    context.drawImage(this._image, left, top, columns.length * cell, rows.length * cell);
    const style = getComputedStyle(this._canvas);
    context.fillStyle = context.strokeStyle = style.color;
    context.font = FONT;
    this._drawLabels(context, left, top, cell, interval);
    if (this._cell) this._drawCell(context, left, top, cell, style.getPropertyValue("--accent"));
  }

  _drawLabels(context, left, top, cell, interval) {
    const { rows, columns } = this.matrix;
    const [currentRow, currentColumn] = this._cell ?? [null, null];
    const font = isCurrent => (isCurrent ? `600 ${FONT}` : FONT);
    context.textBaseline = "middle";
    context.textAlign = "right";
    // The labels next to that of the current cell make room for it.
    const isShown = (index, current) =>
      index === current || (index % interval === 0 && (current === null || Math.abs(index - current) >= interval));
    rows.forEach((row, index) => {
      if (!isShown(index, currentRow)) return;
      context.font = font(index === currentRow);
      context.fillText(row.text, left - 6, top + (index + 0.5) * cell, left - 8);
    });
    context.textAlign = "left";
    columns.forEach((column, index) => {
      if (!isShown(index, currentColumn)) return;
      context.save();
      context.translate(left + (index + 0.5) * cell, top - 6);
      context.rotate(-Math.PI / 4);
      context.font = font(index === currentColumn);
      context.fillText(column.text, 0, 0, 170);
      context.restore();
    });
    if (cell < 27) return;
    context.textAlign = "center";
    context.font = `11px ${FAMILY}`;
    this.matrix.data.forEach((weight, index) => {
      const percent = Math.round(100 * weight);
      if (Math.abs(percent) < 5) return;
      const fill = this._colour(weight);
      context.fillStyle = needsWhite(fill) ? "#fff" : isDark() ? "#14171c" : "#1b1f24";
      context.fillText(String(percent), left + ((index % columns.length) + 0.5) * cell,
        top + (Math.floor(index / columns.length) + 0.5) * cell);
    });
  }

  _drawCell(context, left, top, cell, accent) {
    const { rows, columns } = this.matrix;
    const [row, column] = this._cell;
    context.strokeStyle = accent || "#b35806";
    context.lineWidth = Math.max(1, Math.min(2, cell / 6));
    const draw = (x, y, width, height) => context.strokeRect(left + x * cell, top + y * cell, width * cell, height * cell);
    context.globalAlpha = 0.6;
    if (row !== null && row < rows.length) draw(0, row, columns.length, 1);
    if (column !== null && column < columns.length) draw(column, 0, 1, rows.length);
    context.globalAlpha = 1;
    if (row !== null && column !== null) draw(column, row, 1, 1);
  }

  _point(event) {
    if (!this._shape) return;
    const { left, top, cell } = this._shape;
    const column = Math.floor((event.offsetX - left) / cell);
    const row = Math.floor((event.offsetY - top) / cell);
    const { rows, columns } = this.matrix;
    const isInside = row >= 0 && column >= 0 && row < rows.length && column < columns.length;
    const next = isInside ? [row, column] : null;
    if (String(next) !== String(this._cell)) this._onHover(next);
  }

  _move(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const [row, column] = this._cell ?? [0, 0];
    const clamp = (value, size) => Math.min(size - 1, Math.max(0, value ?? 0));
    this._onHover([
      clamp((row ?? 0) + step[0], this.matrix.rows.length),
      clamp((column ?? 0) + step[1], this.matrix.columns.length),
    ]);
  }
}

const FAMILY = "system-ui, 'Noto Sans', 'DejaVu Sans', sans-serif";
const FONT = `13px ${FAMILY}`;

/** Return a table of the weights, for readers of the page by ear and for copying; null if it is too large. */
export function tableOf(matrix) {
  const { rows, columns } = matrix;
  if (rows.length > MAX_TABLE || columns.length > MAX_TABLE) return null;
  const heading = (textContent, scope) => element("th", { textContent, scope });
  const table = element("table", { ariaLabel: matrix.title });
  table.createTHead().insertRow().append(heading("attends ↓ to →", "col"), ...columns.map(({ text }) => heading(text, "col")));
  const body = table.createTBody();
  rows.forEach((row, index) => body.insertRow().append(heading(row.text, "row"),
    ...columns.map((_, column) => element("td", { textContent: matrix.weight(index, column).toFixed(3) }))));
  return table;
}
