/** The tokens of an output, with their probabilities, and the alternatives on hover or focus. */

import { visible } from "./dom.js";

/**
 * Return the tokens of a text as buttons, shaded by their probability.
 *
 * @param onHover called with the index of the first character of the token under the pointer, or `null`
 */
export function tokenList(tokens, text, onHover) {
  const starts = startsOf(tokens, text);
  const list = document.createElement("p");
  list.className = "tokens";
  list.dir = "auto";
  tokens.forEach((token, index) => {
    const probability = Math.exp(token.logprob);
    const button = document.createElement("button");
    button.type = "button";
    button.className = "token-chip";
    button.textContent = visible(token.text);
    button.style.setProperty("--doubt", String(Math.round(100 * (1 - probability))));
    button.setAttribute("aria-label", `${token.text.trim() || "space"}: probability ${percent(probability)}`);
    for (const type of ["pointerenter", "focus"])
      button.addEventListener(type, () => {
        showAlternatives(button, token);
        onHover(starts[index]);
      });
    for (const type of ["pointerleave", "blur"])
      button.addEventListener(type, () => {
        popup.hidden = true;
        onHover(null);
      });
    list.append(button);
  });
  return list;
}

/** Return the index of the first character of each token in the text; null for special tokens. */
function startsOf(tokens, text) {
  const characters = [...text];
  let position = 0;
  return tokens.map(({ text: token }) => {
    const length = [...token.trimStart()].length;
    while (position < characters.length && !characters[position].trim()) position++;
    const isThere = characters.slice(position, position + length).join("") === token.trimStart();
    if (!isThere || !length) return null;
    position += length;
    return position - length;
  });
}

const percent = probability => (probability >= 0.001 ? `${(100 * probability).toFixed(1)} %` : "less than 0.1 %");

const popup = Object.assign(document.createElement("div"), { className: "popup", hidden: true });
popup.setAttribute("role", "tooltip");
document.body.append(popup);

function showAlternatives(button, token) {
  const table = document.createElement("table");
  table.createCaption().textContent = `Probability ${percent(Math.exp(token.logprob))}`;
  for (const one of token.alternatives ?? []) {
    const line = table.insertRow();
    line.classList.toggle("current", one.id === token.id);
    line.insertCell().textContent = visible(one.text);
    const bar = line.insertCell();
    const meter = Object.assign(document.createElement("meter"), { max: 1, value: Math.exp(one.logprob) });
    meter.ariaLabel = one.text;
    bar.append(meter);
    line.insertCell().textContent = percent(Math.exp(one.logprob));
  }
  popup.replaceChildren(table);
  popup.hidden = false;
  const place = button.getBoundingClientRect();
  popup.style.left = `${Math.max(4, Math.min(place.left, innerWidth - popup.offsetWidth - 12)) + scrollX}px`;
  popup.style.top = `${place.bottom + 6 + scrollY}px`;
}
