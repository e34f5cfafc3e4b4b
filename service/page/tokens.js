/** The tokens of an output, with their probabilities, and the alternatives on hover or focus. */

import { element, visible } from "./dom.js";

/**
 * Return the tokens of a text as buttons, shaded by their probability.
 *
 * @param onHover called with the index of the first character of the token under the pointer, or `null`
 */
export function tokenList(tokens, text, onHover) {
  const starts = startsOf(tokens, text);
  const list = element("p", { className: "tokens", dir: "auto" });
  tokens.forEach((token, index) => {
    const probability = Math.exp(token.logprob);
    const ariaLabel = `${token.text.trim() || "space"}: probability ${percent(probability)}`;
    const button = element("button", { type: "button", className: "token-chip", textContent: visible(token.text), ariaLabel });
    button.style.setProperty("--doubt", String(Math.round(100 * (1 - probability))));
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
export function startsOf(tokens, text) {
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

export const percent = probability => (probability >= 0.001 ? `${(100 * probability).toFixed(1)} %` : "less than 0.1 %");

const popup = element("div", { className: "popup", hidden: true, role: "tooltip" });
document.body.append(popup);

function showAlternatives(button, token) {
  const table = element("table");
  table.createCaption().textContent = `Probability ${percent(Math.exp(token.logprob))}`;
  for (const one of token.alternatives ?? []) {
    const value = Math.exp(one.logprob);
    const line = table.insertRow();
    line.classList.toggle("current", one.id === token.id);
    line.append(element("td", { textContent: visible(one.text) }),
      element("td", {}, element("meter", { max: 1, value, ariaLabel: one.text })), element("td", { textContent: percent(value) }));
  }
  popup.replaceChildren(table);
  popup.hidden = false;
  placeBelow(popup, button);
}

/** Move an element below another one, as far as the screen allows. */
export function placeBelow(moved, node) {
  const place = node.getBoundingClientRect();
  moved.style.left = `${Math.max(4, Math.min(place.left, innerWidth - moved.offsetWidth - 12)) + scrollX}px`;
  moved.style.top = `${place.bottom + 6 + scrollY}px`;
}
