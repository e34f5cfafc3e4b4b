/** The state of the page, and its form in the fragment of a link. */

export const DEFAULTS = {
  a: side(),
  b: null, // the second side of a comparison
  isShared: null, // the sides have one text; null: if their texts are equal
  view: "alignment",
  kind: null, // kind of attention; null: the first that the model has
  layer: null, // null: the layer of the model's alignment, or the last
  head: null, // a number, "mean", "max" or "rollout"; null: the head of the model's alignment, or "mean"
  words: true,
  hideSpecial: true,
};

/** Return the state of one side: a model, its input, and how to decode. */
export function side(values = {}) {
  return {
    model: null,
    input: "",
    messages: null, // of a chat, without the one being written
    system: "", // message of a chat
    query: "",
    source: null, // language of the input
    target: null, // language of the output
    sentence: 0, // index of the sentence that is shown, of a text that was split into sentences
    forced: null, // an edited output of this sentence or of the whole text, or another hypothesis
    hidden: [], // indices of hidden source tokens
    method: "weights", // measure of the attention maps
    parameters: {},
    ...values,
  };
}

/** Return the fragment of a link that reproduces a state; values equal to the defaults are left out. */
export function toFragment(state) {
  const bytes = new TextEncoder().encode(JSON.stringify(difference(state, DEFAULTS)));
  const text = btoa(Array.from(bytes, byte => String.fromCharCode(byte)).join(""));
  return `#1.${text.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "")}`;
}

/** Return the state of a fragment, or null if it is empty or damaged. */
export function fromFragment(fragment) {
  if (!fragment.startsWith("#1.")) return null;
  try {
    const text = atob(fragment.slice(3).replaceAll("-", "+").replaceAll("_", "/"));
    const given = JSON.parse(new TextDecoder().decode(Uint8Array.from(text, character => character.charCodeAt(0))));
    const state = { ...structuredClone(DEFAULTS), ...given, a: side(given.a) };
    state.b = given.b ? side(given.b) : null;
    return isValid(state) ? state : null;
  } catch {
    return null;
  }
}

/** Return true if a fragment is not empty and has no state. */
export const isDamaged = fragment => fragment.length > 1 && fragment !== "#attention" && fromFragment(fragment) === null;

/** Check the types that the page relies on; anybody can write a link. */
function isValid(state) {
  const isSide = one =>
    Number.isSafeInteger(one.sentence) && one.sentence >= 0 &&
    [one.input, one.query, one.system].every(value => typeof value === "string") && Array.isArray(one.hidden) &&
    (one.messages === null || Array.isArray(one.messages)) &&
    one.parameters !== null && typeof one.parameters === "object" &&
    [one.model, one.source, one.target, one.forced].every(value => value === null || typeof value === "string");
  return isSide(state.a) && (state.b === null || isSide(state.b)) && typeof state.view === "string";
}

function difference(values, defaults) {
  const changed = {};
  for (const [name, value] of Object.entries(values)) {
    if (name === "a" || (name === "b" && value)) changed[name] = difference(value, side());
    else if (JSON.stringify(value) !== JSON.stringify(defaults[name])) changed[name] = value;
  }
  return changed;
}
