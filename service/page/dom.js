/** Short ways to build elements. */

/**
 * Return an element.
 *
 * @param properties properties of the element; `aria-…`, `role`, `for` and `data-…` become attributes
 * @param children elements and texts inside it
 */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "role" || key === "for" || key.startsWith("aria-") || key.startsWith("data-")) made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children.filter(child => child !== null));
  return made;
}

let numIds = 0;

/** Return a label with a control in it that follows the text. */
export function field(text, control, help = "") {
  control.id ||= `field-${++numIds}`;
  if (help) control.title = help;
  return element("div", { className: "field" }, element("label", { for: control.id, textContent: text }), control);
}

/** Return a `<select>` with options `[value, text]`, or `[value, text, group]` with the label of their group. */
export function select(options, value, onChange) {
  const made = element("select", {}), groups = {};
  for (const [key, text, group] of options) {
    const parent = group ? groups[group] ??= made.appendChild(element("optgroup", { label: group })) : made;
    parent.append(element("option", { value: key, textContent: text }));
  }
  made.value = value ?? options[0]?.[0] ?? "";
  made.addEventListener("change", () => onChange(made.value));
  return made;
}

/** Return a button. */
export function button(text, onClick, properties = {}) {
  const made = element("button", { type: "button", textContent: text, ...properties });
  made.addEventListener("click", onClick);
  return made;
}

const MARKS = { " ": "␣", "\n": "\\n", "\t": "\\t", "\r": "\\r" };
const VISIBLE = /[^\s\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]/;

/** Return a token, with marks for its characters if all of them are invisible. */
export const visible = text => VISIBLE.test(text) ? text
  : text.replace(/./gsu, one => MARKS[one] ?? `\\u${one.codePointAt(0).toString(16).padStart(4, "0")}`);
