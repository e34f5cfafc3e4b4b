/** One side of the page: a model, its form, and the output. */

import { request, stream } from "./api.js";
import { button, element, errorBox, field, select } from "./dom.js";
import { EXAMPLE_QUERY, examplesOf } from "./examples.js";
import { Hiding } from "./hiding.js";
import { AttentionMaps, METHODS } from "./maps.js";
import { tokenList } from "./tokens.js";

const TITLES = {
  translate: "Translate",
  complete: "Complete",
  chat: "Send",
  classify: "Classify",
  tag: "Find entities",
  rerank: "Rank",
  encode: "Compare",
};
const GROUPS = { translate: "Translate", chat: "Chat", complete: "Complete", encode: "Encode", classify: "Classify", tag: "Find entities", rerank: "Rank" };
const STUDY = "Recurrent and linear systems of the attention study";
// Something follows a line break or a sign that can end a sentence. The service decides where sentences end.
const MAY_HAVE_SENTENCES = /[\n\r\u0085\u2028\u2029.!?…‼⁇⁈⁉。．！？｡।॥؟۔։።፧။]\s*\S/u;
const MAX_LEFT_OUT = 30; // words of a classified text that are left out one by one

/** Return the kind of form that fits a model. */
export function modeOf(card) {
  if (card.chat) return "chat";
  if (card.tasks.includes("generate")) return isDecoderOnly(card) ? "complete" : "translate";
  return ["rerank", "classify", "tag"].find(task => card.tasks.includes(task)) ?? "encode";
}

/** Return the options of a choice of models: with the beginning of their descriptions, in groups by what they do. */
export function modelOptions(cards) {
  const options = cards.map(card => {
    const isOfStudy = card.architecture === "recurrent" || card.attention.some(({ kind }) => kind === "encoder_slots");
    const group = isOfStudy ? STUDY : GROUPS[modeOf(card)];
    const note = card.state === "ready" ? "" : " (loaded on first use)";
    return [card.id, `${card.id} – ${card.description.split(". ", 1)[0].slice(0, 80)}${note}`, group];
  });
  const order = [...Object.values(GROUPS), STUDY];
  return options.sort(([, , one], [, , other]) => order.indexOf(one) - order.indexOf(other)); // stable within a group
}

const isDecoderOnly = card => card.attention.length > 0 && card.attention.every(({ kind }) => kind === "decoder");

export class Panel {
  /**
   * @param root element that the panel fills
   * @param cards models, from GET /v1/models
   * @param side state of this side, which the panel changes
   * @param app `{changed(), edited(panel), hover(start, panel), run(panel), show(), wait()}`: the state changed, the
   *   input was edited, the pointer is at a token of the output that starts at this character, the input is to be
   *   run, there are new maps, or there will be
   */
  constructor(root, cards, side, app) {
    this._root = root;
    this._cards = cards;
    this.side = side;
    this._app = app;
    this.maps = null; // attention maps of the output
    this.outputs = null; // last responses, for the JSON file
    this.messages = null; // dialogue that the output replies to
    this._split = null; // request and outputs of a text that was split into sentences
    this._build();
  }

  get card() {
    return this._cards.find(card => card.id === this.side.model) ?? this._cards[0];
  }

  get isRunning() {
    return this._submit.ariaBusy === "true";
  }

  get mode() {
    return modeOf(this.card);
  }

  /** The output whose tokens and attention are shown: of one sentence if the text was split. */
  get shownText() {
    return (this._split ? this._sentences : this.outputs)?.[0].text;
  }

  _build() {
    const { side, card, mode } = this;
    side.model = card.id;
    if (!side.input && !side.messages) side.input = this._examples()[0];
    if (mode === "rerank" && !side.query) side.query = EXAMPLE_QUERY;
    const example = select([["", "Examples…"], ...this._examples().map(text => [text, text.split("\n")[0]])], "", text => {
      if (text) this._setInput(text);
    });
    this._input = element("textarea", { value: side.input, rows: mode === "encode" || mode === "rerank" ? 4 : 3, dir: "auto", spellcheck: false });
    this._input.addEventListener("input", () => this._edited());
    this._input.addEventListener("keydown", event => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey || mode === "chat") && !event.shiftKey) {
        event.preventDefault();
        this._app.run(this);
      }
    });
    this._status = element("p", { className: "status", role: "status" });
    this._output = element("div", { className: "output" });
    this._form = element("form", {},
      element("div", { className: "line" },
        field("Model", select(modelOptions(this._cards), card.id, name => this._setModel(name)), card.description),
        field("Example", example), ...this._languageFields(),
        card.attention_methods.length > 1 ? field("Method", select(Object.entries(METHODS), side.method, method => { side.method = method; this.run(); })) : null),
      element("p", { className: "about", textContent: card.description }),
      mode === "rerank" ? field("Query", this._textField("query")) : null,
      mode === "chat" ? field("System message", this._textField("system")) : null,
      mode === "chat" ? this._dialogue() : null,
      field({ chat: "Message", encode: "Texts, one on each line", rerank: "Documents, one on each line" }[mode] ?? "Text", this._input),
      this._options(),
      element("div", { className: "line" }, (this._submit = element("button", { className: "primary", textContent: TITLES[mode] })), this._status));
    this._form.addEventListener("submit", event => {
      event.preventDefault();
      this._app.run(this);
    });
    this._root.replaceChildren(this._form, this._output);
  }

  _examples() {
    return examplesOf(this.mode, this.side.source ?? this.card.languages?.source);
  }

  _textField(name) {
    const control = element("input", { value: this.side[name], dir: "auto" });
    control.addEventListener("input", () => (this.side[name] = control.value));
    return control;
  }

  _languageFields() {
    const { languages } = this.card;
    if (!languages || languages.sources.length + languages.targets.length <= 2) return [];
    const names = code => [code, languageName(code)];
    return [
      field("From", select(languages.sources.map(names), this.side.source ?? languages.source, code => (this.side.source = code))),
      field("To", select(languages.targets.map(names), this.side.target ?? languages.target, code => (this.side.target = code))),
    ];
  }

  _dialogue() {
    const list = element("ol", { className: "dialogue" });
    for (const { role, content } of this.side.messages ?? [])
      list.append(element("li", { className: role, dir: "auto" }, element("b", { textContent: `${role}: ` }), content));
    if (this.side.messages?.length)
      list.append(element("li", {}, button("New dialogue", () => {
        Object.assign(this.side, { messages: [], forced: null, input: "" });
        this._build();
        this.run();
        this._input.focus();
      })));
    return list;
  }

  _options() {
    if (!["translate", "complete", "chat"].includes(this.mode)) return null;
    const { parameters } = this.side;
    const parameter = (name, attributes, help) => {
      const input = element("input", { value: parameters[name] ?? "", ...attributes });
      input.addEventListener("input", () => {
        if (input.value === "") delete parameters[name];
        else parameters[name] = input.type === "number" ? input.valueAsNumber : input.value;
      });
      return field(name, input, help);
    };
    const number = (name, placeholder, attributes, help) => parameter(name, { type: "number", placeholder, ...attributes }, help);
    const text = (name, help) => parameter(name, { dir: "auto" }, help);
    const sample = element("input", { type: "checkbox", checked: parameters.do_sample ?? false });
    sample.addEventListener("change", () => {
      if (sample.checked) parameters.do_sample = true;
      else for (const name of ["do_sample", "temperature", "top_p", "seed"]) delete parameters[name];
      options.replaceWith((options = this._optionFields(number, text, sample)));
    });
    let options = this._optionFields(number, text, sample);
    return element("details", {}, element("summary", { textContent: "Decoding options" }), options);
  }

  _optionFields(number, text, sample) {
    const isSampling = sample.checked;
    return element("div", { className: "line" },
      number("max_new_tokens", "128", { min: 1, step: 1 }, "Maximum number of generated tokens."),
      field("do_sample", sample, "Sample each token instead of taking the most probable."),
      ...(isSampling
        ? [number("temperature", "1", { min: 0.05, max: 10, step: 0.05 }), number("top_p", "1", { min: 0.05, max: 1, step: 0.05 }), number("seed", "random", { min: 0, step: 1 })]
        : this.mode === "chat" ? [] : [number("num_beams", "1", { min: 1, max: 8, step: 1 }, "Beams of a beam search; all of their texts are listed.")]),
      this.mode === "chat" ? null : text("target_prefix", "Beginning of the output, which the model continues."));
  }

  _setModel(name) {
    const old = this.mode;
    const wasExample = this._examples().includes(this.side.input);
    Object.assign(this.side, { model: name, forced: null, hidden: [], source: null, target: null });
    if (this.mode !== old || wasExample) this.side.input = "";
    if (this.mode !== old) Object.assign(this.side, { parameters: {}, messages: null });
    this.maps = null;
    this._build();
    this.run();
  }

  _setInput(text) {
    this._input.value = text;
    this._edited();
    this._app.run(this);
  }

  _edited() {
    this.take(this._input.value);
    this._app.edited(this);
  }

  /** Set the input. */
  take(input) {
    Object.assign(this.side, { input, sentence: 0, forced: null, hidden: [] });
    if (this._input.value !== input) this._input.value = input;
  }

  /** Run the model on the input, and show its output and attention. */
  async run() {
    this._abort?.abort();
    const abort = (this._abort = new AbortController());
    if (this.mode === "chat" && this.side.input.trim()) this._send();
    this._output.replaceChildren();
    this._status.textContent = "Working…";
    this._submit.ariaBusy = "true";
    this._app.wait();
    this.maps = this.outputs = this.messages = this._split = null;
    try {
      await this[`_run_${this.mode}`](abort.signal);
      if (abort.signal.aborted) return;
      this._status.textContent = "";
      this._submit.ariaBusy = "false";
      this._app.changed();
      this._app.show();
    } catch (error) {
      if (abort.signal.aborted) return;
      this._submit.ariaBusy = "false";
      this._status.textContent = "";
      this._output.append(errorBox(error, () => this.run()));
      this._app.show();
    }
  }

  /** Fields that select the model and the languages. */
  get _base() {
    return { model: this.card.id };
  }

  get _languages() {
    const { side, card: { languages } } = this;
    return languages ? { source_language: side.source ?? languages.source, target_language: side.target ?? languages.target } : {};
  }

  get _parameters() {
    return { ...this.side.parameters, ...this._languages };
  }

  // Generation

  _run_complete(signal) {
    return this._run_translate(signal);
  }

  async _run_translate(signal) {
    const { side } = this;
    const identity = { ...this._base, inputs: side.input };
    const parameters = { ...this._parameters };
    const isSplit = this.card.training_unit === "sentence" && !parameters.target_prefix && MAY_HAVE_SENTENCES.test(side.input.trim());
    if (side.forced !== null && !isSplit) return this._force(identity, signal);
    const numBeams = parameters.num_beams ?? 1;
    const text = element("p", { className: "text", dir: "auto", lang: this._languages.target_language ?? "" });
    this._output.replaceChildren(text);
    let best;
    let outputs;
    let warnings;
    if (isSplit || numBeams > 1) { // neither can be streamed
      const more = { ...(numBeams > 1 ? { num_return_sequences: numBeams } : {}), ...(isSplit ? { split_sentences: true } : {}) };
      const body = { ...identity, parameters: { ...parameters, ...more, top_logprobs: 5 } };
      ({ outputs, warnings } = await request("/v1/generate", body, signal));
      [best] = outputs;
    } else {
      const tokens = [];
      for await (const event of stream("/v1/generate", { ...identity, stream: true, parameters: { ...parameters, top_logprobs: 5 } }, signal)) {
        if (event.token) {
          tokens.push(event.token);
          text.append(event.text);
        } else {
          best = { ...event, tokens };
          ({ warnings } = event);
        }
      }
      outputs = [best];
    }
    signal.throwIfAborted(); // a newer run has replaced this one
    text.textContent = best.text;
    this.outputs = outputs;
    if (parameters.do_sample) parameters.seed = best.seed;
    if (best.sentences) {
      this._split = { identity, outputs, parameters };
      return this._showSentence(signal);
    }
    if (side.forced !== null) return this._force(identity, signal);
    if (warnings) this._output.append(element("p", { className: "hint", textContent: "The text has several sentences, but the model was trained on single ones and may leave out some of them. Without target_prefix, each sentence is translated." }));
    this._showGenerated(best, outputs);
    this._setMaps({ ...identity, parameters });
    this._hiding(identity, best.text);
  }

  // Texts of several sentences

  get _sentence() {
    return Math.min(this.side.sentence, this._split.outputs[0].sentences.length - 1);
  }

  /** The outputs of the sentence that is shown, as those of a text of its own. */
  get _sentences() {
    const index = this._sentence;
    return this._split.outputs.map(({ sentences, tokens }) => {
      const start = sentences.slice(0, index).reduce((sum, one) => sum + one.num_tokens, 0);
      return { ...sentences[index], tokens: tokens.slice(start, start + sentences[index].num_tokens) };
    });
  }

  /** Show the whole output, and the tokens and the attention of one of its sentences. */
  async _showSentence(signal) {
    const { identity, outputs: [whole], parameters } = this._split;
    const outputs = this._sentences;
    const [best] = outputs;
    const own = { ...identity, inputs: best.source };
    if (this.side.forced !== null) return this._force(own, signal);
    this._output.replaceChildren(element("p", { className: "text", dir: "auto", lang: this._languages.target_language ?? "", textContent: whole.text }), this._sentenceList());
    this._showGenerated(best, outputs);
    // Sequence i of a call has the seed of the call plus i.
    const seed = parameters.do_sample ? { seed: parameters.seed + this._sentence } : {};
    this._setMaps({ ...own, parameters: { ...parameters, ...seed } });
    this._hiding(own, best.text);
  }

  /** Return the list of sentences, one of which is shown; empty if there is only one. */
  _sentenceList() {
    const sentences = this._split?.outputs[0].sentences ?? [];
    if (sentences.length < 2) return "";
    const items = sentences.map(({ source, text }, index) =>
      element("li", {}, button(text.trim() || source, () => this._setSentence(index), { dir: "auto", title: source, ariaPressed: String(index === this._sentence) })));
    return element("details", { open: true, className: "sentences" },
      element("summary", { textContent: "Sentences; choose one to see its tokens and its attention" }), element("ol", {}, ...items));
  }

  _setSentence(index) {
    Object.assign(this.side, { sentence: index, forced: null, hidden: [] });
    this.outputs = this._split.outputs;
    this._showSentence();
    this._app.changed();
    this._app.show();
  }

  /** Read a given text as the output, instead of generating one. */
  async _force(identity, signal) {
    const { side, _languages: parameters } = this;
    const { outputs: [output] } = await request("/v1/score", { ...identity, ...parameters, targets: side.forced, top_logprobs: 5 }, signal);
    this.outputs = [output];
    this._output.replaceChildren(element("p", { className: "text", dir: "auto", textContent: side.forced }), this._sentenceList());
    this._showGenerated({ ...output, text: side.forced }, []);
    this._setMaps({ ...identity, targets: side.forced, parameters });
    this._hiding(identity, side.forced);
  }

  _showGenerated(best, outputs) {
    const tokens = tokenList(best.tokens, best.text, start => this._app.hover(start, this));
    this._output.append(tokens, element("p", { className: "hint", textContent: "Stronger marks are less probable tokens. Point at a token for its alternatives." }));
    if (outputs.length > 1) this._output.append(this._hypotheses(outputs));
    this._output.append(this._editor(best.text));
  }

  _hypotheses(outputs) {
    const list = element("ol", { className: "hypotheses" });
    for (const { text, score } of outputs)
      list.append(element("li", {}, button(text, () => this._setForced(text), { dir: "auto" }), ` ${score.toFixed(3)}`));
    return element("details", { open: true }, element("summary", { textContent: "Best outputs with their scores; choose one to see its attention" }), list);
  }

  /** Return the form that edits the output; the model then reads the edited text. */
  _editor(text) {
    const area = element("textarea", { value: text, rows: 2, dir: "auto", spellcheck: false });
    const reset = this.side.forced === null ? null : button("Back to the generated output", () => this._setForced(null));
    return element("details", { open: this.side.forced !== null }, element("summary", { textContent: "Edit the output" }),
      field("Output that the model reads instead", area),
      element("div", { className: "line" }, button("Show its attention", () => this._setForced(area.value)), reset));
  }

  _setForced(text) {
    this.side.forced = text;
    this.run();
  }

  _setMaps(body) {
    const { attention, attention_methods: methods } = this.card;
    const method = methods.includes(this.side.method) ? this.side.method : "weights";
    const isWhole = method === "value_zeroing" || method === "alti"; // all heads together
    const kinds = attention.map(kind => ({ ...kind, method, heads: isWhole ? 1 : kind.heads, canRollOut: method === "weights" && kind.kind !== "encoder_slots" }));
    if (kinds.length) this.maps = new AttentionMaps(kinds, { ...body, method, prompt_rows: isDecoderOnly(this.card) });
  }

  _hiding(identity, text) {
    const hasCross = this.card.attention.some(({ kind, window }) => kind === "cross" && window === null);
    if (!hasCross || this.mode !== "translate") return;
    const hiding = new Hiding(this.side, identity, text, this._parameters, () => this._app.changed());
    this._output.append(hiding.element);
  }

  /** Move the message that was written to the dialogue, after the reply to the last one. */
  _send() {
    const { side, _reply: reply } = this;
    const messages = [...(side.messages ?? [])];
    if (messages.at(-1)?.role === "user") {
      if (reply) messages.push({ role: "assistant", content: reply });
      else messages.pop(); // it has failed
    }
    messages.push({ role: "user", content: side.input });
    const hasFocus = this._root.contains(document.activeElement);
    Object.assign(side, { messages, input: "", forced: null });
    this._build();
    if (hasFocus) this._input.focus();
  }

  async _run_chat(signal) {
    const { side } = this;
    this._reply = null;
    if (side.messages?.at(-1)?.role !== "user") return;
    const messages = [...(side.system.trim() ? [{ role: "system", content: side.system }] : []), ...side.messages];
    const identity = { ...this._base, messages };
    this.messages = messages;
    const text = element("p", { className: "text", dir: "auto" });
    this._output.replaceChildren(text);
    if (side.forced !== null) {
      text.textContent = this._reply = side.forced;
      this._setMaps({ ...identity, targets: side.forced });
      this._output.append(this._editor(side.forced));
      return;
    }
    const { max_new_tokens, do_sample, temperature, top_p, seed } = side.parameters;
    const body = { ...identity, stream: true, logprobs: true, top_logprobs: 5, temperature: do_sample ? temperature ?? 1 : 0 };
    if (max_new_tokens) body.max_tokens = max_new_tokens;
    if (do_sample && top_p) body.top_p = top_p;
    if (do_sample && seed !== undefined) body.seed = seed;
    const tokens = [];
    for await (const { choices } of stream("/v1/chat/completions", body, signal)) {
      const [choice] = choices ?? [];
      if (!choice) continue;
      text.append(choice.delta?.content ?? "");
      tokens.push(...(choice.logprobs?.content ?? []));
    }
    signal.throwIfAborted();
    const reply = (this._reply = text.textContent);
    const read = one => ({ id: one.token, text: one.token, logprob: one.logprob });
    this.outputs = [{ text: reply, tokens }];
    this._showGenerated({ text: reply, tokens: tokens.map(one => ({ ...read(one), alternatives: (one.top_logprobs ?? []).map(read) })) }, []);
    this._setMaps({ ...identity, targets: reply });
  }

  // Models without a decoder

  async _run_classify(signal) {
    const { side } = this;
    const { outputs: [output] } = await request("/v1/classify", { ...this._base, inputs: side.input }, signal);
    this.outputs = [output];
    this._output.replaceChildren(bars(output.labels.map(({ label, score }) => [label, score])));
    this._setMaps({ ...this._base, inputs: side.input });
    await this._leaveOut(output.labels[0], signal);
  }

  /** Show how the probability of a label changes if one word of the text is left out. */
  async _leaveOut({ label, score }, signal) {
    const words = [...this.side.input.matchAll(/\S+/gu)].slice(0, MAX_LEFT_OUT);
    if (words.length < 2) return;
    const inputs = words.map(({ 0: word, index }) => (this.side.input.slice(0, index) + this.side.input.slice(index + word.length)).trim());
    const { outputs } = await request("/v1/classify", { ...this._base, inputs }, signal);
    const changes = outputs.map(({ labels }) => score - labels.find(one => one.label === label).score);
    const largest = Math.max(...changes.map(Math.abs), 0.01);
    const text = element("p", { className: "words", dir: "auto" });
    words.forEach(({ 0: word }, index) => {
      const change = changes[index];
      const mark = element("span", { className: change >= 0 ? "for" : "against", textContent: word, tabIndex: 0, title: `Without this word: ${label} ${(100 * (score - change)).toFixed(1)} %` });
      mark.style.setProperty("--strength", String(Math.round((100 * Math.abs(change)) / largest)));
      text.append(mark, " ");
    });
    this._output.append(element("h3", { textContent: `Words behind “${label}”` }), text, element("p", {
      className: "hint",
      textContent: `Blue words support ${label}: without them its probability is lower. Orange words speak against it. Each word was left out once. Attention weights below do not show this.`,
    }));
  }

  async _run_tag(signal) {
    const { side } = this;
    const { outputs: [output] } = await request("/v1/tag", { ...this._base, inputs: side.input }, signal);
    this.outputs = [output];
    const characters = [...side.input];
    const text = element("p", { className: "text entities", dir: "auto" });
    let end = 0;
    for (const entity of output.entities) {
      text.append(characters.slice(end, entity.start).join(""));
      text.append(element("mark", { title: `${entity.label}: ${(100 * entity.score).toFixed(1)} %` }, characters.slice(entity.start, entity.end).join(""), element("small", { textContent: ` ${entity.label}` })));
      end = entity.end;
    }
    text.append(characters.slice(end).join(""));
    this._output.replaceChildren(text);
    this._setMaps({ ...this._base, inputs: side.input });
  }

  get _lines() {
    return this.side.input.split("\n").map(line => line.trim()).filter(Boolean);
  }

  async _run_rerank(signal) {
    const documents = this._lines;
    const { results } = await request("/v1/rerank", { ...this._base, query: this.side.query, documents }, signal);
    this.outputs = results;
    this._output.replaceChildren(bars(results.map(one => [documents[one.index], one.relevance_score])));
    this._setMaps({ ...this._base, inputs: [[this.side.query, documents[results[0].index]]] });
  }

  async _run_encode(signal) {
    const texts = this._lines;
    const { embeddings } = await request("/v1/encode", { ...this._base, inputs: texts, normalize: true }, signal);
    this.outputs = texts.map((text, index) => ({ text, embedding: embeddings[index] }));
    const cosine = (first, second) => first.reduce((sum, value, index) => sum + value * second[index], 0);
    const table = element("table", { className: "cosines" });
    table.createCaption().textContent = "Cosine similarity of the texts";
    const head = table.createTHead().insertRow();
    head.append(element("td"), ...texts.map((_, index) => element("th", { scope: "col", textContent: index + 1 })));
    const body = table.createTBody();
    texts.forEach((text, row) => {
      const line = body.insertRow();
      line.append(element("th", { scope: "row", dir: "auto", textContent: `${row + 1}  ${text}` }));
      embeddings.forEach(other => {
        const value = cosine(embeddings[row], other);
        const cell = element("td", { textContent: value.toFixed(2) });
        cell.style.setProperty("--strength", String(Math.round(100 * Math.max(0, value))));
        line.append(cell);
      });
    });
    this._output.replaceChildren(element("div", { className: "scroller" }, table));
    if (!this.card.sentence_similarity)
      this._output.append(element("p", { className: "hint", textContent: "This model was not trained for sentence similarity, so the cosines say little about meaning." }));
    this._setMaps({ ...this._base, inputs: texts[0] });
  }
}

/** Return a list of labels with their scores as bars. */
export function bars(scores) {
  const list = element("ul", { className: "bars" });
  for (const [label, score] of scores)
    list.append(element("li", {}, element("span", { textContent: label, dir: "auto" }), element("meter", { max: 1, value: score, "aria-label": label }), element("span", { textContent: score.toFixed(3) })));
  return list;
}

/** Return the English name of a language. */
export function languageName(code) {
  try {
    return new Intl.DisplayNames(["en"], { type: "language" }).of(code) ?? code;
  } catch {
    return code;
  }
}
