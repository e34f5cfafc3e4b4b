/** Files, links and snippets that export the view of the page. */

import { toFragment } from "./state.js";

/** Offer a file for download. */
export function save(name, content, type) {
  const blob = content instanceof Blob ? content : new Blob([content], { type });
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** Return a promise of the PNG of an SVG, at twice its size. */
export async function pngOf(svg) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), { width: 2 * image.width, height: 2 * image.height });
  const context = canvas.getContext("2d");
  context.scale(2, 2);
  context.drawImage(image, 0, 0);
  return new Promise(resolve => canvas.toBlob(resolve, "image/png"));
}

/** Return the weights of matrices as CSV, one line for each weight. */
export function csvOf(matrices) {
  const quote = text => `"${text.replaceAll('"', '""')}"`;
  const lines = ["map,row,row_token,column,column_token,weight"];
  for (const { title, rows, columns, data } of matrices)
    data.forEach((weight, index) => {
      const [row, column] = [Math.floor(index / columns.length), index % columns.length];
      lines.push([quote(title), row, quote(rows[row].text), column, quote(columns[column].text), weight].join(","));
    });
  return `${lines.join("\n")}\n`;
}

/** Return the weights of matrices as JSON, with the state that produced them. */
export function jsonOf(matrices, state, outputs) {
  const maps = matrices.map(({ title, rows, columns, data }) => ({
    title,
    rows: rows.map(row => row.text),
    columns: columns.map(column => column.text),
    weights: rows.map((_, row) => Array.from(data.subarray(row * columns.length, (row + 1) * columns.length))),
  }));
  return JSON.stringify({ state, outputs, maps }, null, 1);
}

/** Return a link to the view. Everything is in its fragment, which browsers do not send. */
export const linkOf = state => `${location.origin}${location.pathname}${toFragment(state)}`;

/** Return HTML that embeds the view in a page of an allowed site. */
export const snippetOf = state =>
  `<iframe src="${location.origin}${location.pathname}?embed${toFragment(state)}" width="100%" height="640" ` +
  `title="Attention of a model, shown by Sightline" loading="lazy"></iframe>`;

/** Copy a text, and return false if the browser does not allow it. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
