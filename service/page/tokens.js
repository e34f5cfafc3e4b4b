/** The tokens of an output, with their probabilities, and the alternatives on hover or focus. */

/** Return the parts of a text as buttons, shaded by their probability. */
export function tokenList(tokens, onHover) {
  const list = document.createElement("p");
  list.className = "tokens";
  list.dir = "auto";
  tokens.forEach((token, index) => {
    const probability = Math.exp(token.logprob);
    const button = document.createElement("button");
    button.type = "button";
    button.className = "token-chip";
    button.textContent = token.text;
    button.style.setProperty("--doubt", String(Math.round(100 * (1 - probability))));
    button.setAttribute("aria-label", `${token.text.trim() || "space"}: probability ${percent(probability)}`);
    for (const type of ["pointerenter", "focus"])
      button.addEventListener(type, () => {
        showAlternatives(button, token);
        onHover(index);
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
    line.insertCell().textContent = one.text;
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
