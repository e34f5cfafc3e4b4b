"""Small tokenizers of each kind that imported models have, trained on a few sentences."""

from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = [
    "A man in a blue shirt is standing on a ladder cleaning a window.",
    "The dog doesn't like the cat's food, does it? No, it doesn't!",
    "Zwei Männer stehen am Herd und bereiten Essen zu.",
    "I'm sure they've been there before; we're not (at all) sure.",
    "Ein kleiner Junge spielt draußen mit einem Ball auf der Straße.",
]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
THINK = AddedToken("<think>", special=False, normalized=False)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(add_prefix_space: bool = False) -> Tokenizer:
    """Return a tokenizer like that of GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens([THINK])
    tokenizer.post_processor = template(tokenizer, "<s> $A </s>", "<s> $A </s> </s> $B </s>")
    return tokenizer


def metaspace(prepend_scheme: str = "always") -> Tokenizer:
    """Return a Unigram tokenizer like that of T5, XLM-R and Marian."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens([THINK])
    tokenizer.post_processor = template(tokenizer, "$A </s>", "$A </s> $B </s>")
    return tokenizer


def byte_fallback(strips: bool = True) -> Tokenizer:
    """Return a BPE tokenizer like that of Llama 2 and Mistral; without `strips` like Gemma's."""
    plain = Tokenizer(models.BPE(unk_token="<unk>"))
    marks = normalizers.Replace(" ", "▁")
    plain.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), marks]) if strips else marks
    plain.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[*SPECIAL, *BYTES], show_progress=False)
    plain.train_from_iterator([line for line in SENTENCES if line.isascii()], trainer)
    model = plain.model
    model.byte_fallback, model.fuse_unk = True, True
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = plain.normalizer
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([THINK])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    tokenizer.post_processor = template(tokenizer, "<s> $A", "<s> $A <s> $B")
    return tokenizer


def word_piece(cleanup: bool = True) -> Tokenizer:
    """Return a tokenizer like that of BERT."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens([THINK])
    tokenizer.post_processor = template(tokenizer, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]")
    return tokenizer


def template(tokenizer: Tokenizer, single: str, pair: str) -> processors.TemplateProcessing:
    names = {name for name in pair.split() if not name.startswith("$")}
    ids = [(name, tokenizer.token_to_id(name)) for name in sorted(names)]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "byte-level with a prefix space": lambda: byte_level(add_prefix_space=True),
    "metaspace": metaspace,
    "metaspace first": lambda: metaspace("first"),
    "metaspace never": lambda: metaspace("never"),
    "byte fallback": byte_fallback,
    "byte fallback without strip": lambda: byte_fallback(strips=False),
    "word piece": word_piece,
    "word piece without cleanup": lambda: word_piece(cleanup=False),
}
