"""Check that the service can load the tokenizers of a written bundle, and encode texts with them.

The graphs know only the ids below the size of their vocabulary, and only texts of limited length. A
bundle outside of these limits would be refused by the service, or would fail each request.
"""

from collections.abc import Iterator
from pathlib import Path

from sightline.base.bundle import BundleError, Manifest
from sightline.base.text.tokenizer import TextTokenizer, read_tokenizer
from sightline.export.import_errors import ImportFailedError

LONG = 5000  # characters
# Empty, ordinary, long, and with characters that rules of tokenizers treat differently.
TEXTS = (
    "",
    " ",
    "a",
    "Hello, world! It costs 3.50 € (about $4), doesn't it?",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "我喜欢读书。日本語のテキスト、한국어 문장입니다.",
    "مرحبا بالعالم \u202e שלום",
    "e\u0301\u0327\u0327 ﬁ ½ ™ \ufdfa \u1e9e ｱｲｳ",
    "👩‍👩‍👧‍👦🏳️‍🌈🇩🇪",
    "\0\x01\x1b\x7f\u200b\ufeff\ufffd\uffff\U0010ffff",
    "line one\r\n\r\n\tline two\u2028line three ",
    "</s> [CLS] <unk> <|endoftext|> <0x0A> ▁",
    "a" * LONG + "!",
    " " * LONG + "x",
    "ab 12, " * (LONG // 7),
    "é🙂語" * (LONG // 3),
)


def check_serving(folder: Path, manifest: Manifest) -> None:
    """Check the tokenizers, the special tokens and the lengths of a bundle."""
    limits = manifest.limits
    sizes = {manifest.target_tokenizer: limits.vocabulary}
    sizes[manifest.source_tokenizer] = limits.source_vocabulary or limits.vocabulary
    for file, size in sizes.items():
        tokenizer = read_served_tokenizer(folder / file)
        check_texts(tokenizer, size)
        if file == manifest.source_tokenizer:
            _check_length(manifest, tokenizer)
    for key, ids, size in _ids(manifest):
        outside = max(ids, default=0)
        if outside >= size:
            raise ImportFailedError(
                f"{key} is {outside}, but the model has only {size} tokens; correct it in generation_config.json or "
                "config.json, or use the files of this checkpoint alone"
            )


def read_served_tokenizer(file: Path) -> TextTokenizer:
    """Read a `tokenizer.json` as the service does."""
    try:
        return read_tokenizer(file)
    except BundleError as error:
        # The file in a bundle is a copy, which the user does not know.
        reason = str(error).removeprefix(f"{file} ")
        raise ImportFailedError(
            f"the tokenizer {reason}; the service cannot serve it, so use another tokenizer"
        ) from None


def check_texts(tokenizer: TextTokenizer, size: int) -> None:
    """Encode texts that are difficult for some tokenizers; ids must be below `size`."""
    for text in TEXTS:
        try:
            ids = tokenizer.encode(text)
            tokenizer.decode(ids)
        except (RuntimeError, ValueError) as error:
            raise ImportFailedError(
                f"the tokenizer fails for a text of {len(text)} characters, which starts with {text[:20]!r}: "
                f"{error}; the service would fail for such texts, so use another tokenizer"
            ) from None
        outside = max(ids, default=0)
        if outside >= size:
            raise ImportFailedError(
                f"the tokenizer gives the token id {outside}, but the model has only {size} tokens; a template or "
                "an added token of its files belongs to another checkpoint"
            )


def _ids(manifest: Manifest) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield the name, the ids and the size of the vocabulary of each setting with ids, which the
    graph that reads them must have.
    """
    tokens, target = manifest.tokens, manifest.limits.vocabulary
    source = manifest.limits.source_vocabulary or target
    yield "pad_token_id", (tokens.pad_id,), min(source, target)
    yield "the start token of the decoder or its forced_bos_token_id", tokens.start_ids, target
    yield "eos_token_id", tokens.end_ids, target
    yield "eos_token_id", tokens.end_ids[:1], source  # the service tests graphs with this source
    generation = manifest.generation
    for ids in (generation.suppress_tokens, *generation.bad_words):
        yield "a token of suppress_tokens or bad_words_ids", ids, target
    if tokens.mask_id is not None:
        yield "the id of the mask token", (tokens.mask_id,), target
    languages = manifest.languages
    if languages is not None:
        for ids in languages.target_prefix.values():
            yield "the id of a target language", ids, target
        for prefixes in (languages.source_prefix, languages.source_suffix, languages.source_prefix_of_target):
            for ids in prefixes.values():
                yield "the id of a source language", ids, source


def _check_length(manifest: Manifest, tokenizer: TextTokenizer) -> None:
    """Check that the model reads at least one token beside the special tokens and its prompt."""
    embedding, prompt = manifest.embedding, ""
    if embedding is not None and embedding.default_prompt is not None:
        prompt = embedding.prompts[embedding.default_prompt]
    needed = len(tokenizer.encode(prompt)) + 1
    if needed > manifest.limits.max_source_tokens:
        raise ImportFailedError(
            f"a text of one token has {needed} tokens with the special tokens and the prompt of the model, but the "
            f"model reads at most {manifest.limits.max_source_tokens}; correct the limit in config.json or in "
            "the files of the tokenizer and of sentence-transformers, or import more with --max-tokens"
        )
    start = len(manifest.tokens.start_ids)
    if "generate" in manifest.tasks and not manifest.is_decoder_only and start > manifest.limits.max_target_tokens:
        raise ImportFailedError(
            f"the decoder starts with {start} tokens, but has only {manifest.limits.max_target_tokens} positions; "
            "import more with --max-tokens"
        )
