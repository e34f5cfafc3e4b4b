/** Whole documents: a text in parts that a request can hold, and others whole, because only the service can read them. */

const PART_CHARACTERS = 4000; // of a text that can be cut there

export const DOCUMENT_TYPES = "txt md html htm docx odt pptx epub srt vtt po pot xliff xlf json yaml yml".split(" ");

/** Return the ending of the name of a file, if it is a document that the page can translate. */
export const typeOf = name => DOCUMENT_TYPES.find(type => name.toLowerCase().endsWith(`.${type}`));

/** Return files that are translated one by one. */
export async function partsOf(file) {
  if (typeOf(file.name) !== "txt") return [file];
  try {
    const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(await file.arrayBuffer());
    return cut(text).map(part => new File([part], file.name));
  } catch {
    return [file]; // the service knows another encoding, or names what is wrong
  }
}

/** Cut a text at blank lines outside of fenced code, and at other line breaks where there is none for long. */
function cut(text) {
  const parts = [""];
  let fence = null;
  for (const line of text.split(/(?<=\n)/u)) {
    const { length } = parts.at(-1);
    if (!fence && length > (line.trim() ? 4 * PART_CHARACTERS : PART_CHARACTERS)) parts.push("");
    const mark = /^\s*(```|~~~)/u.exec(line)?.[1];
    if (mark) fence = fence === null ? mark : fence === mark ? null : fence;
    parts[parts.length - 1] += line;
  }
  return parts;
}
