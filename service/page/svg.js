/** Pictures as SVG text: of a heat map, of an alignment, and of a grid of all heads. */

import { css, legend, needsWhite, scale } from "./colours.js";

const FONT = "font-family=\"system-ui, 'Noto Sans', 'DejaVu Sans', sans-serif\"";
const CHARACTER_WIDTH = 7.2; // of the font of labels at 13 px, on average
const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\u{1f300}-\u{1faff}]/gu;
const MAX_CELLS = 20_000; // a heat map with more cells contains them as an image
const MAX_LINES_OF_ROW = 4; // of an alignment with many tokens
const MANY_TOKENS = 40;
const LEGEND_WIDTH = 260;
const MAX_GAP = 420; // pixels between the two columns of an alignment

const escapeText = text =>
  text
    .replace(/[^\t\n\r\x20-\ud7ff\ue000-\ufffd\u{10000}-\u{10ffff}]/gu, "\ufffd") // not allowed in XML
    .replace(/[&<>"]/g, character => `&#${character.charCodeAt(0)};`);

/** Estimate the width of a label in pixels. */
export function widthOf(text) {
  return CHARACTER_WIDTH * ([...text].length + (text.match(WIDE) ?? []).length * 0.9) + 4;
}

const document = (width, height, theme, content) =>
  `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" ` +
  `${FONT} font-size="13" fill="${theme === "dark" ? "#e8eaed" : "#1b1f24"}">` +
  `<rect width="${width}" height="${height}" fill="${theme === "dark" ? "#181b21" : "#ffffff"}"/>${content}</svg>`;

/** Return the width of a picture that has room for its title, which is bold and begins at 12 pixels. */
const titleWidth = title => Math.ceil(1.1 * widthOf(title)) + 24;

/** Return a heat map with the labels of its rows and columns and, in large cells, percentages. */
export function heatMap(matrix, { isDifference = false, theme = "light", cell = 30 } = {}) {
  const { rows, columns, maximum } = matrix;
  const size = columns.length > MANY_TOKENS ? 14 : cell;
  const left = Math.min(220, Math.max(...rows.map(row => widthOf(row.text)))) + 16;
  const top = Math.min(160, Math.max(...columns.map(column => widthOf(column.text))) * 0.75) + 44;
  const right = columns.length ? widthOf(columns.at(-1).text) * 0.7 : 0;
  const colour = scale(maximum, { isDifference, theme });
  const parts = [`<text x="12" y="22" font-weight="600">${escapeText(matrix.title)}</text>`];
  rows.forEach((row, index) => {
    const y = top + (index + 0.5) * size;
    parts.push(`<text x="${left - 8}" y="${y}" dy=".35em" text-anchor="end">${escapeText(row.text)}</text>`);
  });
  columns.forEach((column, index) => {
    const x = left + (index + 0.5) * size;
    parts.push(`<text transform="translate(${x} ${top - 8}) rotate(-45)">${escapeText(column.text)}</text>`);
  });
  if (rows.length * columns.length > MAX_CELLS) {
    const url = imageOf(matrix, colour).toDataURL();
    const [width, height] = [columns.length * size, rows.length * size];
    parts.push(`<image x="${left}" y="${top}" width="${width}" height="${height}" preserveAspectRatio="none" ` +
      `style="image-rendering:pixelated" href="${url}"/>`);
  } else {
    for (let row = 0; row < rows.length; row++)
      for (let column = 0; column < columns.length; column++)
        parts.push(cellOf(matrix.weight(row, column), left + column * size, top + row * size, size, colour));
  }
  const width = Math.max(left + columns.length * size + right + 12, titleWidth(matrix.title), LEGEND_WIDTH);
  const bottom = top + rows.length * size;
  const { least, most, colours } = legend(maximum, { isDifference, theme });
  colours.forEach((fill, index) => parts.push(`<rect x="${60 + 6 * index}" y="${bottom + 14}" width="6" height="10" fill="${fill}"/>`));
  const end = (x, anchor, text) => `<text x="${x}" y="${bottom + 23}" text-anchor="${anchor}" font-size="11">${text}</text>`;
  parts.push(end(54, "end", least), end(66 + 6 * colours.length, "start", most));
  return document(Math.ceil(width), Math.ceil(bottom + 36), theme, parts.join(""));
}

function cellOf(weight, x, y, size, colour) {
  const fill = colour(weight);
  const percent = Math.round(100 * weight);
  const text = size >= 26 && Math.abs(percent) >= 5
    ? `<text x="${x + size / 2}" y="${y + size / 2}" dy=".35em" text-anchor="middle" font-size="11" ` +
      `fill="${needsWhite(fill) ? "#fff" : "#1b1f24"}">${percent}</text>`
    : "";
  return `<rect x="${x + 0.5}" y="${y + 0.5}" width="${size - 1}" height="${size - 1}" rx="2" fill="${css(fill)}"/>${text}`;
}

/** Return a canvas with one pixel for each weight. */
export function imageOf(matrix, colour) {
  const canvas = Object.assign(globalThis.document.createElement("canvas"), {
    width: Math.max(1, matrix.columns.length),
    height: Math.max(1, matrix.rows.length),
  });
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  matrix.data.forEach((weight, index) => image.data.set([...colour(weight), 255], 4 * index));
  context.putImageData(image, 0, 0);
  return canvas;
}

/**
 * Return an alignment: columns on the left, rows on the right, and lines as strong as the attention.
 *
 * Tokens and lines carry their row and column, so that the page can highlight them.
 *
 * @param width width of the picture in pixels, as far as it suits; by default that of a column
 */
export function alignment(matrix, { theme = "light", title = true, width: available = 0 } = {}) {
  const { rows, columns, maximum } = matrix;
  const isLarge = Math.max(rows.length, columns.length) > MANY_TOKENS;
  const step = isLarge ? 18 : 28;
  const top = title ? 62 : 34;
  const left = 12 + Math.min(240, Math.max(60, ...columns.map(column => widthOf(column.text))));
  const right = Math.min(240, Math.max(60, ...rows.map(row => widthOf(row.text)))) + 12;
  const gap = Math.max(120, Math.min(MAX_GAP, (available || left + 260 + right) - left - right));
  const width = Math.max(left + gap + right, title ? titleWidth(matrix.title) : 0);
  const height = top + Math.max(rows.length, columns.length) * step + 10;
  const offset = labels => top + ((Math.max(rows.length, columns.length) - labels.length) * step) / 2 + step / 2;
  const [columnTop, rowTop] = [offset(columns), offset(rows)];
  const parts = title ? [`<text x="12" y="22" font-weight="600">${escapeText(matrix.title)}</text>`] : [];
  const heading = (x, anchor, text) =>
    `<text x="${x}" y="${top - 14}" text-anchor="${anchor}" font-size="11" opacity=".75">${text}</text>`;
  parts.push(heading(left, "end", "attended to"), heading(left + gap, "start", "attends"));
  parts.push(heading(left + gap / 2, "middle", `strongest line: ${Math.round(100 * maximum)} %`));
  const colour = theme === "dark" ? "#68acE2" : "#105694";
  parts.push(`<g fill="none" stroke="${colour}" stroke-linecap="round">`);
  for (const [row, column, weight] of strongest(matrix, isLarge ? MAX_LINES_OF_ROW : columns.length)) {
    const [x1, y1, x2, y2] = [left + 6, columnTop + column * step, left + gap - 6, rowTop + row * step];
    const middle = (x1 + x2) / 2;
    const share = Math.abs(weight) / maximum;
    parts.push(`<path data-row="${row}" data-column="${column}" d="M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}" ` +
      `stroke-width="${(0.6 + 5 * share).toFixed(2)}" stroke-opacity="${(0.06 + 0.84 * share).toFixed(2)}"/>`);
  }
  parts.push("</g>");
  const token = (name, index, x, y, anchor, text) =>
    `<text class="token" data-${name}="${index}" x="${x}" y="${y}" dy=".35em" text-anchor="${anchor}">${escapeText(text)}</text>`;
  columns.forEach((one, index) => parts.push(token("column", index, left, columnTop + index * step, "end", one.text)));
  rows.forEach((one, index) => parts.push(token("row", index, left + gap, rowTop + index * step, "start", one.text)));
  return document(width, height, theme, parts.join(""));
}

/** Yield the strongest weights of each row, as `[row, column, weight]`; weights near 0 are left out. */
function* strongest(matrix, count) {
  const columns = matrix.columns.length;
  const least = matrix.maximum * 0.02;
  for (let row = 0; row < matrix.rows.length; row++) {
    const weights = Array.from(matrix.data.subarray(row * columns, (row + 1) * columns), (weight, column) => [weight, column]);
    if (count < columns) weights.sort(([first], [second]) => Math.abs(second) - Math.abs(first));
    for (const [weight, column] of weights.slice(0, count)) if (Math.abs(weight) >= least) yield [row, column, weight];
  }
}

/**
 * Return a grid of small heat maps, one for each head.
 *
 * @param layers `[layer, [matrix of head 0, …]]` for each layer
 */
export function grid(layers, { theme = "light", title = "", size = 84 } = {}) {
  const [left, top, gap] = [64, 62, 8];
  const heads = Math.max(...layers.map(([, matrices]) => matrices.length));
  const parts = [`<text x="12" y="22" font-weight="600">${escapeText(title)}</text>`];
  for (let head = 0; head < heads; head++)
    parts.push(`<text x="${left + head * (size + gap) + size / 2}" y="${top - 8}" text-anchor="middle" font-size="11">head ${head}</text>`);
  layers.forEach(([layer, matrices], line) => {
    const y = top + line * (size + gap);
    parts.push(`<text x="${left - 8}" y="${y + size / 2}" dy=".35em" text-anchor="end" font-size="11">layer ${layer}</text>`);
    matrices.forEach((matrix, head) => {
      const url = imageOf(matrix, scale(matrix.maximum, { theme })).toDataURL();
      parts.push(`<image x="${left + head * (size + gap)}" y="${y}" width="${size}" height="${size}" ` +
        `preserveAspectRatio="none" style="image-rendering:pixelated" href="${url}"/>`);
    });
  });
  return document(Math.max(left + heads * (size + gap) + 12, titleWidth(title)), top + layers.length * (size + gap) + 12, theme, parts.join(""));
}
