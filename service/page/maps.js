/** Attention maps of one input: fetched layer by layer, and combined into the matrix that is shown. */

import { request } from "./api.js";
import { visible } from "./dom.js";

const VALUES_PER_REQUEST = 250_000; // attention weights in one response: about 1 MB

// Names of special tokens: <s>, <|im_end|>, [SEP], __de__, deu_Latn.
const SPECIAL = /^(<[^<>\s]+>|\[\w+\]|__\w+__|[a-z]{3}_[A-Z][a-z]{3})$/;

/** A token (or a word) that labels a row or a column. Special tokens are not part of a text. */
const label = (text, offsets) => ({
  text: visible(text).trim(),
  isSpecial: offsets === null && SPECIAL.test(text.trim()),
  offsets,
});

/** A matrix of weights, row-major, with the labels of its rows and columns. */
export class Matrix {
  constructor(rows, columns, data, title) {
    this.rows = rows;
    this.columns = columns;
    this.data = data;
    this.title = title;
  }

  weight(row, column) {
    return this.data[row * this.columns.length + column];
  }

  /** Return the matrix without the special tokens. The weights that remain are not rescaled. */
  withoutSpecial() {
    const kept = labels => [...labels.keys()].filter(index => !labels[index].isSpecial);
    return this.select(kept(this.rows), kept(this.columns));
  }

  select(rows, columns) {
    if (rows.length === this.rows.length && columns.length === this.columns.length) return this;
    const data = new Float32Array(rows.length * columns.length);
    let at = 0;
    for (const row of rows) for (const column of columns) data[at++] = this.weight(row, column);
    return new Matrix(rows.map(row => this.rows[row]), columns.map(column => this.columns[column]), data, this.title);
  }

  /** Return this matrix minus another one of the same shape. */
  minus(other) {
    const data = this.data.map((weight, index) => weight - other.data[index]);
    return new Matrix(this.rows, this.columns, data, `${this.title} minus ${other.title}`);
  }

  /** True if each row attends to one token only, as with hard attention. */
  get isHard() {
    const { length } = this.columns;
    return length > 1 && this.rows.every((_, row) => this.data.subarray(row * length, (row + 1) * length).some(weight => weight > 0.999));
  }

  hasLabelsOf(other) {
    const same = (first, second) => first.length === second.length && first.every((one, index) => one.text === second[index].text);
    return same(this.rows, other.rows) && same(this.columns, other.columns);
  }

  /** Return the largest absolute weight, at least a tiny number so that it can divide. */
  get maximum() {
    let maximum = 1e-9;
    for (const weight of this.data) maximum = Math.max(maximum, Math.abs(weight));
    return maximum;
  }
}

/** The attention maps of one input and its output. Layers are requested when they are first shown. */
export class AttentionMaps {
  /**
   * @param kinds description of the kinds, from `attention` in GET /v1/models
   * @param body fields of POST /v1/attention that identify the input and the output
   */
  constructor(kinds, body) {
    this.kinds = kinds;
    this._body = body;
    this._layers = new Map(); // "kind/units/layer" to a promise of that layer
    this._sizes = new Map(); // "kind/units" to the number of weights in one layer
  }

  kind(name) {
    return this.kinds.find(kind => kind.kind === name);
  }

  /** Return a promise of one layer: `{rows, columns, heads: Float32Array[], statistics, text}`. */
  layer(kind, units, layer) {
    const key = `${kind}/${units}/${layer}`;
    if (!this._layers.has(key)) this._request(kind, units, layer);
    return this._layers.get(key);
  }

  /** Request a layer, and with it the following ones as far as one response should hold them. */
  _request(kind, units, first) {
    const { layers: count, heads } = this.kind(kind);
    const size = this._sizes.get(`${kind}/${units}`);
    const number = size ? Math.max(1, Math.floor(VALUES_PER_REQUEST / size)) : heads * count <= 64 ? count : 1;
    const layers = [];
    for (let layer = first; layer < count && layers.length < number; layer++)
      if (!this._layers.has(`${kind}/${units}/${layer}`)) layers.push(layer);
    const body = { ...this._body, kinds: [kind], layers, units, statistics: true, encoding: "base64" };
    const response = request("/v1/attention", body).then(({ outputs: [output] }) => {
      const read = this._read(kind, units, output);
      return layers.map((_, index) => read(index));
    });
    layers.forEach((layer, index) => {
      const key = `${kind}/${units}/${layer}`;
      const promise = response.then(read => read[index], async error => {
        if (error.code !== "response_too_large" || layers.length === 1) throw error;
        const one = await request("/v1/attention", { ...body, layers: [layer] }); // together they are too large
        return this._read(kind, units, one.outputs[0])(0);
      });
      promise.catch(() => this._layers.delete(key)); // a retry sends the request again
      this._layers.set(key, promise);
    });
  }

  _read(kind, units, output) {
    const [map] = output.maps;
    const [, heads, numRows, numColumns] = map.shape;
    this._sizes.set(`${kind}/${units}`, heads * numRows * numColumns);
    const bytes = Uint8Array.from(atob(map.data), character => character.charCodeAt(0));
    const values = new Float32Array(bytes.buffer);
    const { rows, columns } = labelsOf(map, output);
    const size = numRows * numColumns;
    return index => ({
      rows,
      columns,
      heads: Array.from({ length: heads }, (_, head) =>
        values.subarray((index * heads + head) * size, (index * heads + head + 1) * size)),
      statistics: (map.statistics ?? []).filter(one => one.layer === map.layers[index]),
      output,
    });
  }

  /**
   * Return the matrix of one head, of all heads combined, or of a rollout.
   *
   * @param head index of a head, "mean", "max" or "rollout"
   */
  async matrix(kind, units, layer, head) {
    if (head === "rollout") return this._rollout(kind, units, layer);
    const one = await this.layer(kind, units, layer);
    const name = typeof head === "number" ? `head ${head}` : `${REDUCTIONS[head]} of ${one.heads.length} heads`;
    const data = typeof head === "number" ? one.heads[head] : combine(one.heads, head);
    return new Matrix(one.rows, one.columns, data, `${KIND_NAMES[kind]}, layer ${layer}, ${name}`);
  }

  /**
   * Return the attention rollout up to a layer (Abnar and Zuidema 2020, section 3): the product over the
   * layers of (A + I) / 2, where A is the mean over the heads. Cross-attention of the layer, also the mean
   * over its heads, is multiplied by the rollout of the whole encoder.
   */
  async _rollout(kind, units, layer) {
    if (kind === "cross") {
      const cross = await this.matrix("cross", units, layer, "mean");
      if (!this.kind("encoder")) return cross;
      const encoder = await this._rollout("encoder", units, this.kind("encoder").layers - 1);
      const data = multiply(cross.data, encoder.data, cross.rows.length, cross.columns.length, encoder.columns.length);
      return new Matrix(cross.rows, encoder.columns, data, `Cross-attention of layer ${layer} × rollout of the encoder`);
    }
    let product = null;
    let last = null;
    for (let index = 0; index <= layer; index++) {
      last = await this.layer(kind, units, index);
      const mixed = withResidual(combine(last.heads, "mean"), last.rows.length, last.columns.length);
      const size = last.columns.length;
      product = product ? multiply(mixed, product, size, size, size) : mixed;
    }
    // Rows of a decoder without prompt rows are the last ones of a square matrix.
    const data = product.slice(product.length - last.rows.length * last.columns.length);
    return new Matrix(last.rows, last.columns, data, `${KIND_NAMES[kind]}, rollout of layers 0 to ${layer}`);
  }
}

export const METHODS = { weights: "weights", norms: "norms", value_zeroing: "value zeroing", alti: "ALTI+" };
const REDUCTIONS = { mean: "mean", max: "maximum" };

export const KIND_NAMES = {
  encoder: "Encoder self-attention",
  encoder_slots: "Encoder attention to projected keys",
  cross: "Cross-attention",
  decoder: "Decoder self-attention",
};

/** Return the labels of the rows and columns of a map of an output. */
export function labelsOf(map, output) {
  const pair = (tokens, offsets) => tokens.map((token, index) => label(token, offsets ? offsets[index] : []));
  const source = pair(output.source_tokens, output.source_offsets);
  if (map.kind === "encoder") return { rows: source, columns: source };
  if (map.kind === "encoder_slots") {
    const keys = Array.from({ length: map.columns }, (_, index) => label(`key ${index}`, []));
    return { rows: source, columns: keys };
  }
  const target = pair(output.target_tokens, output.target_offsets);
  if (map.kind === "cross") return { rows: target, columns: source };
  // The decoder reads its prompt, then all tokens of the target but the last.
  const read = output.decoder_input_tokens;
  const columns = read.map((token, index) => {
    const fromTarget = index - (read.length - (target.length - 1));
    if (fromTarget >= 0 && target[fromTarget]?.text === visible(token).trim()) return target[fromTarget];
    const isOfPrompt = output.source_tokens[index] === token;
    return isOfPrompt ? source[index] : label(token, null);
  });
  return { rows: target, columns };
}

function combine(heads, how) {
  const result = Float32Array.from(heads[0]);
  for (const head of heads.slice(1))
    for (let index = 0; index < result.length; index++)
      result[index] = how === "max" ? Math.max(result[index], head[index]) : result[index] + head[index];
  return how === "max" ? result : result.map(value => value / heads.length);
}

/** Return (A + I) / 2 as a square matrix; rows that the map lacks, at its start, are those of I. */
function withResidual(data, rows, columns) {
  const result = new Float32Array(columns * columns);
  for (let row = 0; row < columns; row++) {
    const given = row - (columns - rows);
    for (let column = 0; column < columns; column++)
      result[row * columns + column] = given >= 0 ? data[given * columns + column] / 2 : 0;
    result[row * columns + row] += given >= 0 ? 0.5 : 1;
  }
  return result;
}

function multiply(left, right, rows, inner, columns) {
  const result = new Float32Array(rows * columns);
  for (let row = 0; row < rows; row++)
    for (let index = 0; index < inner; index++) {
      const factor = left[row * inner + index];
      if (factor === 0) continue;
      for (let column = 0; column < columns; column++)
        result[row * columns + column] += factor * right[index * columns + column];
    }
  return result;
}
