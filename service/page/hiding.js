/** Hide source tokens from the decoder, and see how the output and its probabilities change. */

import { request } from "./api.js";
import { element, visible } from "./dom.js";

const SAME_VECTOR = 0.9; // cosine above which two source tokens carry nearly the same vector
const SMALL_CHANGE = 0.05; // of a log-probability

export class Hiding {
  /**
   * @param side state of the side; its list `hidden` is changed
   * @param identity fields of a request that select the model and the input
   * @param text output whose tokens are scored with and without the hidden tokens
   * @param parameters parameters of the generation
   * @param onChange called when the list has changed
   */
  constructor(side, identity, text, parameters, onChange) {
    Object.assign(this, { _side: side, _identity: identity, _text: text, _parameters: parameters, _onChange: onChange });
    this._tokens = element("p", { className: "tokens", dir: "auto" });
    this._result = element("div", { role: "status" });
    this.element = element("details", { className: "hiding", open: side.hidden.length > 0 },
      element("summary", { textContent: "Hide source tokens" }),
      element("p", { className: "hint", textContent: "Choose tokens that the decoder may not see. Attention shows where the decoder reads, not what its output depends on: a token with much attention may change nothing, and one with little may change everything." }),
      this._tokens, this._result);
    this.element.addEventListener("toggle", () => this.element.open && !this._tokens.childElementCount && this._load());
  }

  async _load() {
    try {
      const { model, inputs } = this._identity;
      const { outputs: [tokens] } = await request("/v1/tokenize", { model, inputs });
      this._names = tokens.map(({ text }) => visible(text).trim());
      this._tokens.replaceChildren(...tokens.map((token, index) => this._button(token, index)));
      if (this._side.hidden.length) await this._compare();
    } catch (error) {
      this._showError(error);
    }
  }

  _button(token, index) {
    const made = element("button", { type: "button", className: "token-chip toggle", textContent: visible(token.text) });
    made.ariaPressed = String(this._side.hidden.includes(index));
    made.setAttribute("aria-label", `Hide ${this._names[index]}`);
    made.addEventListener("click", () => {
      const { hidden } = this._side;
      this._side.hidden = hidden.includes(index) ? hidden.filter(one => one !== index) : [...hidden, index].sort((a, b) => a - b);
      made.ariaPressed = String(this._side.hidden.includes(index));
      this._onChange();
      this._compare().catch(error => this._showError(error));
    });
    return made;
  }

  _showError(error) {
    this._result.replaceChildren(element("p", { className: "error", textContent: error.message }));
  }

  async _compare() {
    const { hidden } = this._side;
    if (!hidden.length) return this._result.replaceChildren();
    const { source_language, target_language } = this._parameters; // undefined ones are not sent
    const score = extra => request("/v1/score", { ...this._identity, source_language, target_language, targets: this._text, ...extra });
    const [{ outputs: [generated] }, { outputs: [before] }, { outputs: [after] }, similar] = await Promise.all([
      request("/v1/generate", { ...this._identity, parameters: { ...this._parameters, hidden_source_tokens: hidden } }),
      score({}),
      score({ hidden_source_tokens: hidden }),
      this._similarTokens(hidden),
    ]);
    if (hidden !== this._side.hidden) return; // another choice was made meanwhile
    const changes = after.tokens.map((token, index) => token.logprob - before.tokens[index].logprob);
    this._result.replaceChildren(
      element("p", {}, `Without ${hidden.map(index => `“${this._names[index]}”`).join(", ")} the model writes: `, element("b", { textContent: generated.text, dir: "auto" }),
        generated.text === this._text ? " (the same)" : ""),
      this._changesOf(before, after),
      ...(similar.length && changes.every(change => Math.abs(change) < SMALL_CHANGE || hidden.length < 2) ? similar.map(one => this._hint(one)) : []),
    );
  }

  /** Return the tokens of the output with the change of their probabilities. */
  _changesOf(before, after) {
    const { tokens } = before;
    const table = element("table", { className: "changes" });
    table.createCaption().textContent = "Probability of each token of the output before and after";
    const lines = [["Token", ...tokens.map(token => visible(token.text).trim())], ["Before", ...tokens.map(percentOf)], ["After", ...after.tokens.map(percentOf)]];
    lines.forEach(([head, ...values], row) => {
      const line = table.insertRow();
      line.append(element("th", { scope: "row", textContent: head }));
      values.forEach((value, index) => {
        const cell = element(row ? "td" : "th", { textContent: value, ...(row ? {} : { scope: "col" }) });
        const lost = Math.exp(tokens[index].logprob) - Math.exp(after.tokens[index].logprob);
        if (row === 2) cell.style.setProperty("--strength", String(Math.round(100 * Math.min(1, Math.abs(lost)))));
        if (row === 2) cell.className = lost > 0 ? "against" : "for";
        line.append(cell);
      });
    });
    return element("div", { className: "scroller" }, table);
  }

  /** Return pairs of a hidden and a visible token whose vectors in the encoder are nearly the same. */
  async _similarTokens(hidden) {
    const { model, inputs } = this._identity;
    const { embeddings: [flat], shapes: [[rows, size]] } = await request("/v1/encode", { model, inputs, pooling: "none", normalize: true });
    const cosine = (first, second) => {
      let sum = 0;
      for (let index = 0; index < size; index++) sum += flat[first * size + index] * flat[second * size + index];
      return sum;
    };
    const pairs = [];
    for (const one of hidden)
      for (let other = 0; other < rows; other++)
        if (!hidden.includes(other) && cosine(one, other) > SAME_VECTOR) pairs.push([one, other, cosine(one, other)]);
    return pairs;
  }

  _hint([one, other, cosine]) {
    return element("p", { className: "hint", textContent: `“${this._names[one]}” and “${this._names[other]}” have almost the same vector in the encoder (cosine ${cosine.toFixed(2)}), so hiding one of them alone shows little. Hide both.` });
  }
}

const percentOf = ({ logprob }) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
