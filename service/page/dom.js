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

/** Return the message of an error, with a retry if it can help; after an overload, the retry waits as long as the service asks. */
export function errorBox(error, onRetry) {
  const retry = button("Retry", onRetry);
  const box = element("div", { className: "error", role: "alert" }, element("p", { textContent: error.message }), error.canRetry ? retry : null);
  let seconds = Math.ceil(error.retryAfter ?? 0);
  const count = () => {
    retry.disabled = seconds > 0;
    retry.textContent = seconds > 0 ? `Retry in ${seconds} s` : "Retry";
    if (seconds-- > 0) setTimeout(count, 1000);
  };
  count();
  return box;
}

const MARKS = { " ": "␣", "\n": "\\n", "\t": "\\t", "\r": "\\r" };
// All but whitespace, control characters, marks without width of their own, and fillers.
const VISIBLE = new RegExp(String.raw`[^\s\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e`
  + String.raw`\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\u{e0000}-\u{e0fff}]`, "u");

/** Return a token, with marks for its characters if all of them are invisible. */
export const visible = text => VISIBLE.test(text) ? text
  : text.replace(/./gsu, one => MARKS[one] ?? `\\u${one.codePointAt(0).toString(16).padStart(4, "0")}`);
