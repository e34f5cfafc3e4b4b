/** Whole documents: cut into parts that a request can hold, or sent whole if only the service can read them. */

const MAX_CHARACTERS = 4000; // of a request, if the document can be cut there
const UNDIVIDED = "table, pre, svg, p, h1, h2, h3, h4, h5, h6"; // elements that stay in one part

const OTHERS = Object.fromEntries("docx odt pptx epub srt vtt po pot xliff xlf json yaml yml".split(" ").map(type => [type, ""]));
export const DOCUMENT_TYPES = { txt: "text/plain", md: "text/markdown", html: "text/html", htm: "text/html", ...OTHERS };

/** Return the ending of the name of a file, if it is a document that the page can translate. */
export const typeOf = name => Object.keys(DOCUMENT_TYPES).find(type => name.toLowerCase().endsWith(`.${type}`));

/**
 * Read the text of a document, or take the file of a type that only the service can read.
 *
 * @returns `{markup, requests, write(language)}`: the markup of its parts, lists of parts `{text, set(translation)}`,
 *   each for one request, and the whole document
 */
export function readDocument(type, content) {
  const whole = { file: content, set: translation => (whole.translation = translation) };
  if (content instanceof File) return { requests: [[whole]], write: () => whole.translation };
  return DOCUMENT_TYPES[type] === "text/html" ? readHtml(content) : readText(content);
}

/** Cut a text at blank lines outside of fenced code, and at other line breaks where there is none for long. */
function readText(content) {
  const texts = [""];
  let fence = null;
  for (const line of content.split(/(?<=\n)/u)) {
    const { length } = texts.at(-1);
    if (!fence && length > (line.trim() ? 4 * MAX_CHARACTERS : MAX_CHARACTERS)) texts.push("");
    const mark = /^\s*(```|~~~)/u.exec(line)?.[1];
    if (mark) fence = fence === null ? mark : fence === mark ? null : fence;
    texts[texts.length - 1] += line;
  }
  const requests = [...texts.keys()].filter(index => texts[index].trim()).map(index =>
    [{ text: texts[index], set: translation => (texts[index] = translation) }]);
  return { requests, write: () => texts.join("") };
}

/** Cut HTML at elements. It is parsed without running its scripts. */
function readHtml(content) {
  const root = new DOMParser().parseFromString(content, "text/html");
  const parts = [];
  const add = (name, node) => parts.push({ text: node[name], set: html => (node[name] = html) });
  const divide = node => {
    const hasText = [...node.childNodes].some(child => child.nodeType === Node.TEXT_NODE && child.data.trim());
    if (node === root.body && hasText) add("innerHTML", node);
    else if (node !== root.body && (hasText || node.outerHTML.length <= MAX_CHARACTERS || node.matches(UNDIVIDED))) add("outerHTML", node);
    else [...node.children].filter(child => !child.matches("script, style")).forEach(divide);
  };
  for (const title of root.head.querySelectorAll("title")) add("innerHTML", title);
  divide(root.body);
  const requests = [];
  let size = Infinity;
  for (const part of parts) {
    if (size + part.text.length > MAX_CHARACTERS) {
      requests.push([]);
      size = 0;
    }
    requests.at(-1).push(part);
    size += part.text.length;
  }
  const write = language => {
    root.documentElement.lang = language;
    return `${root.doctype ? "<!DOCTYPE html>\n" : ""}${root.documentElement.outerHTML}\n`;
  };
  return { markup: "html", requests, write };
}
