// Translate texts with Bergamot's engine in WebAssembly, as its package @browsermt/bergamot-translator
// does for a service: `node bergamot.mjs PACKAGE MODEL WORKERS`, with the folders of the package and
// of a Firefox model. Each line of the input is a task, and each line of the output its result:
//
//   {"texts": [...], "html": false, "clients": 64, "pairs": 1}    `clients` texts wait at once, for
//   {"texts": [...], "seconds": 1.5, "megabytes": 300}            each of the pairs with the same model
import {readdirSync, readFileSync} from "node:fs";
import {join, resolve} from "node:path";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const [folder, model, workers] = process.argv.slice(2);
const {BatchTranslator, TranslatorBacking} = await import(pathToFileURL(resolve(folder, "translator.js")));

function read(pattern) {
  const name = readdirSync(model).find((each) => pattern.test(each));
  return new Uint8Array(readFileSync(join(model, name))).buffer;
}

class Local extends TranslatorBacking {
  async loadModelRegistery() {
    return [{from: "en", to: "pt", files: {}}];
  }
  async loadTranslationModel() {
    return {model: read(/^model.*\.bin$/), shortlist: read(/^lex.*\.bin$/), vocabs: [read(/^vocab.*\.spm$/)]};
  }
}

const translators = []; // one for each pair: ten models exceed the memory of one

async function translate({texts, html, clients, pairs}) {
  while (translators.length < pairs) {
    const options = {workers: Number(workers)};
    translators.push(new BatchTranslator(options, new Local(options)));
  }
  const started = performance.now(), outputs = [], turns = texts.entries();
  async function client() {
    for (const [index, text] of turns) {
      for (const translator of translators) {
        outputs[index] = (await translator.translate({from: "en", to: "pt", text, html})).target.text;
      }
    }
  }
  await Promise.all(Array.from({length: clients}, client));
  return {texts: outputs, seconds: (performance.now() - started) / 1000, megabytes: process.memoryUsage().rss / 1e6};
}

for await (const line of createInterface({input: process.stdin})) {
  process.stdout.write(JSON.stringify(await translate(JSON.parse(line))) + "\n");
}
process.exit();
