import { encodeTexts, generateText, showAttention } from "./client";
import { client } from "./client/client.gen";

declare const process: { argv: string[]; exitCode: number };
const [baseUrl, auth] = process.argv.slice(2);
client.setConfig({ baseUrl, auth });

async function main() {
  const options = { throwOnError: true } as const;
  const body = { inputs: "A dog runs." };
  const generated = await generateText({ ...options, body: { ...body, parameters: { max_new_tokens: 20 } } });
  const encoded = await encodeTexts({ ...options, body });
  const shown = await showAttention({ ...options, body: { ...body, kinds: ["cross"] } });
  const text: string = generated.data.outputs[0].text;
  const attention = shown.data.outputs[0].maps[0];
  console.log(JSON.stringify([text, encoded.data.embeddings[0].length, attention.kind, attention.shape]));
}
main();
