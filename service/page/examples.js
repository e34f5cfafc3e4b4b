/** Examples for each kind of model, and for translation by source language. */

export const EXAMPLES = {
  translate: {
    en: ["Two girls are playing with a small brown dog on the beach.", "A man in a red shirt is riding a bicycle.", "The children who live next door have built a house of snow."],
    de: ["Zwei Mädchen spielen mit einem kleinen braunen Hund am Strand.", "Ein Mann in einem roten Hemd fährt Fahrrad."],
    fr: ["Deux filles jouent avec un petit chien brun sur la plage."],
    es: ["Dos niñas juegan con un pequeño perro marrón en la playa."],
    pt: ["Duas meninas brincam com um pequeno cão castanho na praia."],
    ar: ["تلعب فتاتان مع كلب صغير على الشاطئ."],
    zh: ["两个女孩在海滩上和一只棕色的小狗玩耍。"],
    ja: ["二人の女の子が浜辺で小さな茶色の犬と遊んでいます。"],
  },
  complete: ["The quick brown fox jumps over", "The capital of France is"],
  chat: ["Always finish with sunshine. How are you?", "Tell me a joke.", "What is the opposite of big?"],
  classify: ["a stirring , funny and finally transporting film .", "one long string of cliches , told without any charm ."],
  tag: ["Ada Lovelace was born in London and wrote to Charles Babbage."],
  encode: ["A dog runs on the beach.\nA puppy is running by the sea.\nThe bank raised its rates."],
  rerank: ["A dog runs on the beach.\nThe bank raised its interest rates.\nA cat sleeps in the sun."],
};

export const EXAMPLE_QUERY = "Who is running?";

/** Return the examples for a kind of form and, for translation, a source language. */
export function examplesOf(mode, language) {
  const found = EXAMPLES[mode];
  if (Array.isArray(found)) return found;
  return found[(language ?? "en").split("-")[0]] ?? found.en;
}
