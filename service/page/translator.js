/** The translator: two texts whose words point at each other, alternatives for a word, and whole documents. */

import { request, RequestError } from "./api.js";
import { button, element, errorBox, field, select } from "./dom.js";
import { copy, save } from "./exports.js";
import { languageName, modelOptions } from "./panel.js";
import { DEFAULTS, side, toFragment } from "./state.js";
import { percent, placeBelow, startsOf } from "./tokens.js";

const AUTO = "auto"; // in place of a source language: the service detects it
const DOCUMENT_TYPES = "txt md html htm docx odt pptx epub srt vtt po pot xliff xlf json yaml yml".split(" ");
const POLL_MS = 300; // between questions about a document
const PAUSE_MS = 500; // without typing, after which a text is translated
const MAX_TYPED = 3000; // characters; longer texts wait for the button
const NUM_ALTERNATIVES = 5;
const HINT = "Point at a word, or move to it with the keyboard, to see which words it stands for. Choose a word of the translation for alternatives.";

/** True if a model translates between languages. */
export const translates = card => card.languages !== null && card.tasks.includes("generate");

export class Translator {
  /**
   * @param root element that the translator fills
   * @param cards models, from GET /v1/models; the default model is the first of them
   * @param onChange called with the fragment of a link that shows the attention of the text
   */
  constructor(root, cards, onChange) {
    this._cards = cards.filter(translates);
    this._onChange = onChange;
    [this._card] = this._cards;
    ({ source: this._source, target: this._target } = this._card.languages);
    this._detected = null; // language of the last translated text
    this._texts = ["", ""]; // source and translation
    this._words = [[], []]; // `{node, start, end, sentence}` of both texts
    this._sentences = []; // `{ranges: [source, translation], links}`; empty while the texts do not belong together
    this._build(root);
  }

  _build(root) {
    this._languages = element("div", { className: "line" });
    this._about = element("p", { className: "about" });
    this._input = element("textarea", { dir: "auto", placeholder: "Type or paste a text.", ariaLabel: "Text to translate" });
    this._mirror = element("div", { className: "mirror", dir: "auto", "aria-hidden": "true" });
    this._output = element("div", { className: "translation", dir: "auto", role: "group", ariaLabel: "Translation" });
    this._status = element("span", { className: "status", role: "status" });
    this._readout = element("output", { className: "readout", textContent: HINT });
    this._popup = element("div", { className: "popup", popover: "auto", role: "dialog" });
    this._file = element("input", { type: "file", accept: DOCUMENT_TYPES.map(type => `.${type}`).join() });
    this._document = element("div", { role: "group", ariaLabel: "Document", ariaLive: "polite" });
    root.replaceChildren(this._languages, this._about,
      element("div", { className: "texts" }, element("div", { className: "source" }, this._mirror, this._input), this._output),
      this._readout,
      element("div", { className: "line" }, button("Translate", () => this.translate(), { className: "primary" }),
        button("Copy the translation", async () => (this._status.textContent = (await copy(this._texts[1])) ? "Copied." : "The browser does not allow copying.")),
        this._status),
      element("div", { className: "line" }, field("Translate a document (.docx, .odt, .pptx, .epub, .html, .md, .txt, .srt, .po, …)", this._file)), this._document, this._popup);
    this._input.addEventListener("input", () => this._edited());
    this._input.addEventListener("keydown", event => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.translate();
    });
    this._file.addEventListener("change", () => {
      if (this._file.files.length) this._translateFile(this._file.files[0]);
      this._file.value = ""; // the same file can be chosen again
    });
    this._listen();
    this._showLanguages();
  }

  /** Show the words that belong together when the pointer, the focus or the caret is at one of them. */
  _listen() {
    const wordOf = (index, node) => this._words[index].find(word => word.node === node) ?? null;
    this._input.addEventListener("pointermove", ({ clientX, clientY }) => {
      const node = document.elementsFromPoint(clientX, clientY).find(one => one.parentNode === this._mirror);
      this._light(0, wordOf(0, node));
    });
    const atCaret = () => this._light(0, this._words[0].find(({ start, end }) => start <= this._input.selectionStart && this._input.selectionStart < end) ?? null);
    for (const type of ["keyup", "click"]) this._input.addEventListener(type, atCaret);
    for (const type of ["pointerover", "focusin"]) this._output.addEventListener(type, event => this._light(1, wordOf(1, event.target)));
    for (const place of [this._input, this._output])
      for (const type of ["pointerleave", "focusout"]) place.addEventListener(type, () => this._light(0, null));
    this._output.addEventListener("click", event => this._offer(wordOf(1, event.target)));
    this._output.addEventListener("keydown", event => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key] * (getComputedStyle(this._output).direction === "rtl" ? -1 : 1);
      const word = wordOf(1, event.target);
      if (word && (event.key === "Enter" || event.key === " ")) this._offer(word);
      else if (word && step) this._words[1][this._words[1].indexOf(word) + step]?.node.focus();
      else return;
      event.preventDefault();
    });
    this._output.addEventListener("focusin", ({ target }) => this._setTabStop(target));
    this._popup.addEventListener("toggle", () => this._light(1, wordOf(1, document.activeElement)));
  }

  _setTabStop(node) {
    for (const word of this._words[1]) word.node.tabIndex = word.node === node ? 0 : -1;
  }

  // Languages

  _fitting(source, target) {
    const reads = ({ sources }) => source === AUTO || sources.includes(source);
    return this._cards.filter(({ languages }) => reads(languages) && (!target || languages.targets.includes(target)));
  }

  _targetsOf(source) {
    const all = new Set(this._fitting(source).flatMap(({ languages }) => languages.targets));
    if (all.size > 1) all.delete(source);
    return [...all];
  }

  /** The language of the text: chosen, or detected in its last translation. */
  get _from() {
    return this._source === AUTO ? this._detected : this._source;
  }

  _showLanguages() {
    const named = codes => [...new Set(codes)].map(code => [code, languageName(code)]).sort(([, one], [, other]) => one.localeCompare(other));
    const fitting = this._fitting(this._source, this._target);
    if (!fitting.includes(this._card)) [this._card] = fitting;
    const canSwap = this._fitting(this._target, this._from).length > 0 && this._from !== null;
    const swap = button("⇄", () => this._swap(), {
      id: "swap", ariaLabel: "Swap the languages", disabled: !canSwap, title: canSwap ? "" : "No model translates in the other direction.",
    });
    const sources = named(this._cards.flatMap(({ languages }) => languages.sources));
    if (sources.length > 1) sources.unshift([AUTO, `Detect language${this._detected ? `: ${languageName(this._detected)}` : ""}`]);
    const from = select(sources, this._source, code => this._setLanguages(code, this._target));
    const to = select(named(this._targetsOf(this._source)), this._target, code => this._setLanguages(this._source, code));
    const model = select(modelOptions(fitting), this._card.id, id => {
      this._card = fitting.find(card => card.id === id);
      this._setLanguages(this._source, this._target);
    });
    const { id } = document.activeElement;
    for (const [name, control] of Object.entries({ from, to, model })) control.id = name;
    const hasChoice = fitting.length > 1 && this._source !== AUTO;
    this._languages.replaceChildren(field("From", from), swap, field("To", to), ...(hasChoice ? [field("Translation model", model)] : []));
    if (id) this._languages.querySelector(`#${id}`)?.focus();
    this._about.textContent = this._card.description;
    this._output.lang = this._target;
    this._input.lang = this._mirror.lang = this._from ?? "";
  }

  _setLanguages(source, target) {
    const targets = this._targetsOf(source);
    this._source = source;
    this._detected = null;
    this._target = targets.includes(target) ? target : targets[0];
    this._showLanguages();
    this.translate();
  }

  _swap() {
    this._input.value = this._texts[1] || this._input.value;
    this._setLanguages(this._target, this._from);
  }

  get _pair() {
    return { source_language: this._from, target_language: this._target };
  }

  /** The fields of a translation: a model, unless the language of the text chooses it, and the languages. */
  get _choice() {
    return { ...(this._source === AUTO ? {} : { model: this._card.id }), parameters: { ...this._pair, source_language: this._source } };
  }

  // Texts

  _edited() {
    clearTimeout(this._timer);
    this._abort?.abort();
    this._status.textContent = "";
    this._show([this._input.value, this._texts[1]], [], true);
    if (this._input.value.length <= MAX_TYPED) this._timer = setTimeout(() => this.translate(), PAUSE_MS);
  }

  async translate() {
    this._edited();
    clearTimeout(this._timer);
    const text = this._input.value;
    if (!text.trim()) return this._show([text, ""], []);
    this._status.textContent = "Translating…";
    const { signal } = (this._abort = new AbortController());
    try {
      const { parameters, ...choice } = this._choice;
      const return_coverage = this._source !== AUTO && this._showsOmissions; // else the model is not known yet
      const body = { ...choice, inputs: text, parameters: { ...parameters, return_coverage } };
      const { outputs: [output] } = await request("/v1/translate", body, signal);
      if (this._source === AUTO) {
        this._detected = output.route[0].source;
        this._card = this._cards.find(({ id }) => id === output.route.at(-1).model);
        this._showLanguages();
      }
      const units = [text, output.text].map(unitsOf);
      const ranges = output.sentences.map(([start, end, first, last]) => [[units[0][start], units[0][end]], [units[1][first], units[1][last]]]);
      this._show([text, output.text], ranges.map(one => ({ ranges: one, links: null })));
      this._status.textContent = "Translated.";
      await this._markDoubts(output, signal);
    } catch (error) {
      if (signal.aborted) return;
      this._status.textContent = "";
      this._output.replaceChildren(errorBox(error, () => this.translate()));
    }
  }

  /** Show two texts and their sentences; `isOld` if the translation is that of an earlier text. */
  _show(texts, sentences, isOld = false) {
    this._texts = texts;
    this._sentences = sentences;
    this._lit = null;
    this._popup.hidePopover(); // it is about words that are replaced
    const roots = [this._mirror, this._output];
    this._words = texts.map((text, index) => fill(roots[index], text, sentences.map(({ ranges }) => ranges[index]), roots[index].lang));
    this._mirror.append("\u200b"); // a line break at the end has a line
    for (const { node } of this._words[1]) node.role = "button";
    this._setTabStop(this._words[1][0]?.node);
    this._output.classList.toggle("old", isOld);
    this._readout.textContent = HINT;
    const [input] = texts;
    const hasModel = this._fitting(this._from, this._target).includes(this._card); // two may have translated
    this._onChange(input.trim() && hasModel ? toFragment({ ...DEFAULTS, a: side({ model: this._card.id, input, source: this._from, target: this._target }) }) : "#attention");
  }

  get _showsOmissions() {
    return this._card.coverage?.threshold != null;
  }

  /** Mark the words that a translation omits and its doubtful words, with the reasons. */
  async _markDoubts(output, signal) {
    const sentences = this._sentences;
    if (!this._showsOmissions || !sentences.length) return;
    const body = { model: this._card.id, inputs: this._texts[0], parameters: { ...this._pair, return_coverage: true } };
    try {
      if (!output.coverage) ({ outputs: [output] } = await request("/v1/translate", body, signal));
    } catch {
      return; // the translation itself is complete
    }
    if (sentences !== this._sentences || output.text !== this._texts[1]) return;
    const omitted = output.coverage.source_words.filter(word => word.omitted).map(word => [word, "The translation seems to omit this word."]);
    const doubtful = output.coverage.target_words.filter(word => word.doubtful)
      .map(word => [word, `The model gave this word a probability of ${percent(Math.exp(word.logprob))}.`]);
    for (const [index, marked] of [omitted, doubtful].entries()) {
      const units = unitsOf(this._texts[index]);
      for (const [word, reason] of marked) {
        for (const { node } of this._words[index].filter(one => overlap([units[word.start], units[word.end]], one))) {
          node.classList.add(index ? "doubtful" : "omitted");
          node.title = reason;
        }
      }
    }
  }

  // Attention

  /** Light up a word of one text (0: the source) and its partners in the other; `null` lights up nothing. */
  async _light(index, word) {
    if (word === this._lit || (!word && this._popup.matches(":popover-open"))) return;
    this._lit = word;
    for (const { node } of this._words.flat()) node.classList.remove("near", "current", "partner");
    this._readout.textContent = HINT;
    if (!word) return;
    const sentence = this._sentences[word.sentence];
    for (const one of this._words.flat()) one.node.classList.toggle("near", one.sentence === word.sentence);
    word.node.classList.add("current");
    if (!this._card.alignment) return (this._readout.textContent = "This model has no attention between its texts.");
    let links;
    try {
      links = await (sentence.links ??= this._align(sentence));
    } catch (error) {
      sentence.links = null;
      if (this._lit === word) this._readout.textContent = error.message;
      return;
    }
    if (this._lit !== word) return;
    const own = links.filter(({ ranges }) => overlap(ranges[index], word));
    const partners = this._words[1 - index].filter(one => own.some(({ ranges }) => overlap(ranges[1 - index], one)));
    const parts = partners.map(one => {
      const weight = Math.max(...own.filter(({ ranges }) => overlap(ranges[1 - index], one)).map(link => link.weight));
      one.node.classList.add("partner");
      one.node.style.setProperty("--strength", String(Math.round(100 * weight)));
      return `\u2068${one.node.textContent}\u2069 ${Math.round(100 * weight)} %`;
    });
    const none = index ? "no word of the text" : "no word of the translation";
    this._readout.textContent = `\u2068${word.node.textContent}\u2069 ${index ? "←" : "→"} ${parts.join(", ") || none}${word.node.title && `. ${word.node.title}`}`;
  }

  /** Return the links between the words of a sentence: their ranges in the texts, and the weight. */
  async _align({ ranges }) {
    const [inputs, targets] = ranges.map(([start, end], index) => this._texts[index].slice(start, end));
    const { outputs: [output] } = await request("/v1/align", { model: this._card.id, inputs, targets, ...this._pair });
    const units = [inputs, targets].map(unitsOf);
    const rangeOf = ({ start, end }, index) => [units[index][start] + ranges[index][0], units[index][end] + ranges[index][0]];
    return output.links.map(([source, target, weight]) =>
      ({ ranges: [rangeOf(output.source_words[source], 0), rangeOf(output.target_words[target], 1)], weight }));
  }

  // Alternatives

  async _offer(word) {
    if (!word || getSelection().toString()) return; // the click has ended a selection
    const { ranges } = this._sentences[word.sentence];
    this._popup.ariaLabel = `Alternatives for ${word.node.textContent}`;
    this._popup.replaceChildren(element("p", { textContent: "Looking for alternatives…" }));
    this._popup.showPopover();
    placeBelow(this._popup, word.node);
    try {
      const found = await this._alternatives(ranges.map(([start, end], index) => this._texts[index].slice(start, end)), word.start - ranges[1][0]);
      const buttons = found.map(({ name, probability, text }) =>
        button(`${name} ${percent(probability)}`, () => this._replace(word, text), { title: text, dir: "auto" }));
      this._popup.replaceChildren(element("p", { textContent: found.length ? "Instead, with its sentence:" : "The model has no alternative here." }), ...buttons);
      buttons[0]?.focus();
    } catch (error) {
      this._popup.replaceChildren(element("p", { className: "error", textContent: error.message }));
    }
    placeBelow(this._popup, word.node);
  }

  /** Return translations with another word at a place, by the alternatives of the token that begins there. */
  async _alternatives([source, text], place) {
    const base = { model: this._card.id };
    const { outputs: [{ tokens }] } = await request("/v1/score", { ...base, ...this._pair, inputs: source, targets: text, top_logprobs: NUM_ALTERNATIVES });
    const token = tokens[startsOf(tokens, text).indexOf([...text.slice(0, place)].length)];
    const isSpaced = one => one.text !== one.text.trimStart();
    const others = (token?.alternatives ?? []).filter(one => one.id !== token.id && /^\s*[\p{L}\p{N}]/u.test(one.text) && isSpaced(one) === isSpaced(token));
    if (!others.length) return [];
    const before = isSpaced(token) ? text.slice(0, place).trimEnd() : text.slice(0, place);
    const parameters = { ...this._pair, target_prefix: others.map(one => before + one.text) };
    const { outputs } = await request("/v1/generate", { ...base, inputs: others.map(() => source), parameters });
    const nameOf = one => wordsOf(one.slice(place), this._target)[0]?.segment;
    const found = outputs.map((output, index) => ({ text: output.text, name: nameOf(output.text), probability: Math.exp(others[index].logprob) }));
    const names = found.map(({ name }) => name);
    return found.filter(({ name }, index) => name && name !== nameOf(text) && names.indexOf(name) === index);
  }

  /** Replace the translation of a sentence. */
  _replace(word, text) {
    const [start, end] = this._sentences[word.sentence].ranges[1];
    const index = this._words[1].indexOf(word);
    const change = text.length - (end - start);
    const sentences = this._sentences.map(({ ranges: [source, [first, last]], links }, number) =>
      number < word.sentence ? { ranges: [source, [first, last]], links }
        : { ranges: [source, [first + (number > word.sentence ? change : 0), last + change]], links: null });
    this._show([this._texts[0], this._texts[1].slice(0, start) + text + this._texts[1].slice(end)], sentences);
    (this._words[1][index] ?? this._words[1].at(-1)).node.focus();
  }

  // Documents

  async _translateFile(file) {
    this._fileAbort?.abort();
    const { signal } = (this._fileAbort = new AbortController());
    const type = DOCUMENT_TYPES.find(one => file.name.toLowerCase().endsWith(`.${one}`));
    if (!type) {
      const textContent = `The page translates files that end with ${DOCUMENT_TYPES.map(one => `.${one}`).join(", ")}.`;
      return this._document.replaceChildren(element("p", { className: "error", role: "alert", textContent }));
    }
    const { parameters: { source_language: source_lang, target_language: target_lang }, ...model } = this._choice;
    const bar = element("progress", { ariaLabel: `Translated part of ${file.name}` });
    const place = element("div");
    const close = () => {
      this._fileAbort.abort();
      this._document.replaceChildren();
    };
    this._document.replaceChildren(element("p", { className: "line" }, `${file.name} `, bar, button("Cancel", close)), place);
    const work = async () => {
      place.replaceChildren();
      try {
        const content = await translateDocument({ file, ...model, source_lang, target_lang }, bar, signal);
        const name = `${file.name.slice(0, -type.length)}${target_lang}.${type}`;
        const download = button(`Download ${name}`, () => save(name, content), { className: "primary" });
        const hasFocus = this._document.contains(document.activeElement);
        this._document.replaceChildren(element("p", { className: "line" }, download, button("Close", close)));
        if (hasFocus) download.focus();
      } catch (error) {
        if (!signal.aborted) place.replaceChildren(errorBox(error, work));
      }
    };
    await work();
  }
}

/** Return a translated document. The service translates it in the background, and estimates how long that takes. */
async function translateDocument(body, bar, signal) {
  const started = Date.now();
  const { document_id: id, ...key } = await request("/v2/document", body, signal);
  for (;;) {
    const { status, seconds_remaining: seconds, error_message: message } = await request(`/v2/document/${id}`, key, signal);
    if (status === "done") return request(`/v2/document/${id}/result`, key, signal);
    if (status === "error") throw new RequestError(message);
    if (seconds !== null) bar.value = 1 - (1000 * seconds) / (Date.now() - started + 1000 * seconds);
    await new Promise(resolve => setTimeout(resolve, POLL_MS));
  }
}

/** Return the words of a text: `{segment, index}`. */
const wordsOf = (text, language) => [...new Intl.Segmenter(language, { granularity: "word" }).segment(text)].filter(({ isWordLike }) => isWordLike);

/** Fill an element with a text. Return its words in sentences, which become elements. */
function fill(root, text, sentences, language) {
  const words = [];
  const content = new DocumentFragment();
  let position = 0;
  let sentence = 0;
  for (const { segment, index } of sentences.length ? wordsOf(text, language) : []) {
    while (sentence < sentences.length && sentences[sentence][1] <= index) sentence++;
    if (sentence === sentences.length || index < sentences[sentence][0]) continue;
    const node = element("span", { className: "word", textContent: segment });
    words.push({ node, start: index, end: index + segment.length, sentence });
    content.append(text.slice(position, index), node);
    position = index + segment.length;
  }
  content.append(text.slice(position));
  root.replaceChildren(content);
  return words;
}

/** Return the index in a JavaScript string of each character, which the service counts in code points. */
function unitsOf(text) {
  const units = [0];
  for (const character of text) units.push(units.at(-1) + character.length);
  return units;
}

const overlap = ([first, last], { start, end }) => first < end && start < last;
