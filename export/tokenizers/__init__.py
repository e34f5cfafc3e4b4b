"""Tokenizers of checkpoints as files of the `tokenizers` library."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, processors

from sightline.base.text.tokenizer_parts import checked_names
from sightline.export.import_errors import ImportFailedError
from sightline.export.tokenizers.language_tokens import M2M100, MBART, MBART_50, language_ids, language_tokens
from sightline.export.tokenizers.sentencepiece import (
    PieceKind,
    SentencePieceModel,
    convert_sentencepiece,
    read_sentencepiece,
)
from sightline.export.tokenizers.vocabulary import convert_byte_level, convert_word_pieces

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
END = "</s>"
# Templates of a text and of a pair of texts, by the special tokens around them.
ENDED = f"$A {END}", f"$A $B {END}"
BERT = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
ROBERTA_TOKENS = ("<s>", "<pad>", END, "<unk>", "<mask>")
ROBERTA = f"<s> $A {END}", f"<s> $A {END} {END} $B {END}"
# Model types whose inputs start with a token of the language. `Languages` in the manifest has these
# tokens, so that the tokenizer must not add them.
MULTILINGUAL = ("m2m_100", "mbart")
# Soft hyphens, and other characters that show nothing and would cut a word. Joiners and non-joiners
# are removed only after letters of scripts that do not write them.
INVISIBLE = (
    r"[\x{AD}\x{34F}\x{61C}\x{180E}\x{200B}\x{200E}\x{200F}\x{202A}-\x{202E}\x{2060}-\x{206F}\x{FEFF}]+"
    r"|(?<=[\p{Latin}\p{Greek}\p{Cyrillic}])[\x{200C}\x{200D}]+"
)
# Words of Qwen 2 and 3: contractions, letters after at most one other character, single digits,
# other characters, line breaks, and spaces.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


class Files(Protocol):
    """Files of a checkpoint, see `sightline.export.sources.opened_checkpoint.Folder`."""

    @property
    def module(self) -> str: ...  # folder of the Transformer with a slash, or ""
    @property
    def model_type(self) -> str: ...
    def bytes(self, name: str) -> bytes | None: ...
    def json(self, name: str) -> Any: ...


@dataclass(frozen=True)
class ConvertedTokenizers:
    """Tokenizers of the source and the target, without truncation and padding."""

    source: Tokenizer
    target: Tokenizer  # the same object if they do not differ
    # Ids of the language tokens by BCP 47 tag. Empty if the model has no such tokens.
    language_ids: Mapping[str, int]


def read_or_convert_tokenizers(folder: Files) -> ConvertedTokenizers:
    """Read the tokenizer of a Hugging Face checkpoint, or convert it from its vocabulary files.

    `tokenizer.json` is used as it is, except that truncation and padding are removed, and that
    tokenizers of multilingual models add only the end token. Marian always has two other files.
    """
    with _library_errors(f"{TOKENIZER} or other files of the tokenizer"):
        tokenizers = _read_or_convert(TokenizerFiles(folder))
        for tokenizer in (tokenizers.source, tokenizers.target):
            _try(tokenizer)
    return tokenizers


@contextmanager
def _library_errors(files: str) -> Iterator[None]:
    """Convert errors of the tokenizers library, which are bare exceptions and panics."""
    try:
        yield
    except (ImportFailedError, MemoryError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ImportFailedError(
            f"{files} cannot be used: {str(error).rstrip('.')}; they may be damaged or belong to another checkpoint: "
            "download them again, or save the tokenizer with transformers' AutoTokenizer and save_pretrained"
        ) from None


def _try(tokenizer: Tokenizer) -> None:
    checked_names(tokenizer)
    for pair in (None, ""):
        tokenizer.encode("", pair)  # panics if the template has wrong names


def _read_or_convert(reader: "TokenizerFiles") -> ConvertedTokenizers:
    if reader.model_type == "marian":
        return _convert_marian(reader)
    data = reader.data(TOKENIZER)
    if data is not None:
        tokenizer = Tokenizer.from_buffer(data)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if reader.model_type in MULTILINGUAL:
            _with_template(tokenizer, *ENDED)
    elif reader.model_type in CONVERSIONS:
        tokenizer = CONVERSIONS[reader.model_type](reader)
    else:
        raise ImportFailedError(
            f"the checkpoint has no {TOKENIZER}, and that of model type {reader.model_type!r} cannot be converted; "
            f"supported without {TOKENIZER} are {', '.join(sorted([*CONVERSIONS, 'marian']))}. Save the tokenizer "
            "with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    added = {token.content: id_ for id_, token in tokenizer.get_added_tokens_decoder().items()}
    languages = language_ids(added) if reader.model_type in MULTILINGUAL else {}
    if data is None:
        _add_tokens(tokenizer, reader)
    return ConvertedTokenizers(tokenizer, tokenizer, languages)


def firefox_tokenizer(data: bytes, file: str) -> Tokenizer:
    """Convert a vocabulary of a Firefox translation model, such as `vocab.ende.spm`.

    The ids are those of the file, and an encoded text ends with `</s>`. Invisible characters, such
    as soft hyphens, are removed before the text is tokenized, as Firefox does.
    """
    model = read_sentencepiece(data, file)
    if END not in model.ids:
        raise ImportFailedError(f"{file} has no piece {END!r}, which ends a text")
    with _library_errors(file):
        tokenizer = convert_sentencepiece(model, special=[END], prefix=[normalizers.Replace(Regex(INVISIBLE), "")])
        _try(_with_template(tokenizer, *ENDED))
    return tokenizer


class TokenizerFiles:
    """Access to the files of the folder with the Transformer."""

    def __init__(self, folder: Files) -> None:
        self._folder = folder
        self.model_type = folder.model_type
        config = self.json(TOKENIZER_CONFIG)
        self.config: dict[str, Any] = config if isinstance(config, dict) else {}
        others = self.json("special_tokens_map.json")
        if others is not None and not isinstance(others, dict):
            raise ImportFailedError("special_tokens_map.json must be a JSON object")
        self.special: dict[str, Any] = others or {}

    def data(self, name: str) -> bytes | None:
        return self._folder.bytes(self._folder.module + name)

    def json(self, name: str) -> Any:
        return self._folder.json(self._folder.module + name)

    def required(self, name: str) -> bytes:
        data = self.data(name)
        if data is None:
            raise ImportFailedError(
                f"the checkpoint has no {TOKENIZER} and no {name}, from which its tokenizer could be converted"
            )
        return data

    def lines(self, name: str) -> str:
        try:
            return self.required(name).decode()
        except UnicodeDecodeError as error:
            raise ImportFailedError(f"{name} is not UTF-8: {error}") from None

    def vocabulary(self, name: str) -> dict[str, int]:
        """Return a JSON object of tokens and ids from 0 without gaps."""
        self.required(name)
        values = self.json(name)
        if not isinstance(values, dict) or sorted(map(str, values.values())) != sorted(map(str, range(len(values)))):
            raise ImportFailedError(
                f"{name} must be a JSON object of tokens with the ids 0 to N - 1, each of them once"
            )
        return values

    def sentencepiece(self, name: str) -> SentencePieceModel:
        return read_sentencepiece(self.required(name), name)

    def option(self, key: str, default: Any) -> Any:
        """Return an option of tokenizer_config.json, which has the type of its default."""
        value = default if self.config.get(key) is None else self.config[key]
        if type(value) is not type(default) or not 0 <= value <= 1000:
            kind = "true or false" if isinstance(default, bool) else "an integer from 0 to 1000"
            raise ImportFailedError(f"{TOKENIZER_CONFIG}: {key} must be {kind}")
        return value

    def special_token(self, key: str, default: str | None = None) -> str | None:
        """Return the name of a special token, such as that of `bos_token`.

        special_tokens_map.json precedes tokenizer_config.json, unless that one has
        `added_tokens_decoder`, as in transformers.
        """
        for values in ({} if "added_tokens_decoder" in self.config else self.special, self.config):
            if key in values:
                token = values[key].get("content") if isinstance(values[key], dict) else values[key]
                if token is not None and not isinstance(token, str):
                    raise ImportFailedError(f"{TOKENIZER_CONFIG} and special_tokens_map.json: {key} must be a token")
                return token
        return default

    def additional_special_tokens(self) -> list[str]:
        """Return the names that special_tokens_map.json or tokenizer_config.json list."""
        for values in (self.special, self.config):
            for key in ("additional_special_tokens", "extra_special_tokens"):
                tokens = values.get(key)
                if isinstance(tokens, list) and tokens:
                    names = [token.get("content") if isinstance(token, dict) else token for token in tokens]
                    return [name for name in names if isinstance(name, str)]
        return []


# Options of the normalizer of BERT by their keys in tokenizer_config.json.
_BERT_OPTIONS = {
    "do_lower_case": "lowercase", "strip_accents": "strip_accents", "tokenize_chinese_chars": "handle_chinese_chars"
}  # fmt: skip


def contradictions(folder: Files, tokenizer: Tokenizer, ids: Mapping[str, Collection[int]]) -> list[str]:
    """Return a note for each value in which the files of a checkpoint contradict tokenizer.json.

    `ids` has special tokens by their keys, such as `eos_token`, as the configurations name them. A
    token to which tokenizer_config.json gives another id is an `ImportFailedError`.
    """
    reader, notes = TokenizerFiles(folder), list[str]()
    for key, expected in ids.items():
        named = reader.special_token(key)
        if named and expected and (own := tokenizer.token_to_id(named)) not in (None, *expected):
            used = ", ".join(map(str, expected))
            notes.append(
                f"{TOKENIZER_CONFIG} has the {key} {named}, whose id is {own}, but the configuration has the id "
                f"{used}, which is used"
            )
    if reader.model_type == "marian" or reader.data(TOKENIZER) is None:
        return notes  # the tokenizer was made from these files
    options, stated = _options(json.loads(tokenizer.to_str())), list[str]()
    for key in sorted(options.keys() & reader.config.keys()):
        if isinstance(value := reader.config[key], bool) and value != options[key]:
            stated.append(f"{key} {json.dumps(value)}, but {TOKENIZER}: {json.dumps(options[key])}")
    added = tokenizer.get_added_tokens_decoder()
    for id_, token in _described_tokens(reader):
        name = repr(token.content[:40])
        if (known := tokenizer.token_to_id(token.content)) not in (None, id_):
            raise ImportFailedError(
                f"{TOKENIZER_CONFIG}: added_tokens_decoder gives the token {name} the id {id_}, but {TOKENIZER} "
                f"{known}; correct the one that is wrong, or download both again"
            )
        if id_ not in added or added[id_].__getstate__() != token.__getstate__():
            stated.append(f"an added token {name}, but {TOKENIZER}: it is none, or one of other options")
    end = "The latter is used; AutoTokenizer of transformers may give other tokens"
    return [*notes, *(f"{TOKENIZER_CONFIG} has {text}. {end}" for text in stated)]


def _options(document: Mapping[str, Any]) -> dict[str, bool]:
    """Return the options of a tokenizer by their keys in tokenizer_config.json."""
    options, parts = {"do_lower_case": False}, [document["normalizer"], document["pre_tokenizer"]]
    for part in filter(None, parts):
        parts += [*part.get("normalizers", ()), *part.get("pretokenizers", ())]
        match part["type"]:
            case "BertNormalizer":
                part["strip_accents"] = part["lowercase"] if part["strip_accents"] is None else part["strip_accents"]
                options |= {key: part[name] for key, name in _BERT_OPTIONS.items()}
            case "Lowercase":
                options["do_lower_case"] = True
            case "ByteLevel":
                options["add_prefix_space"] = part["add_prefix_space"]
            case "Metaspace":
                options["add_prefix_space"] = part["prepend_scheme"] != "never"
    has_rules = any(part and part["type"] == "Precompiled" for part in parts)  # which may convert to lowercase
    if has_rules and not options["do_lower_case"]:
        del options["do_lower_case"]
    return options


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the special tokens by their names."""
    return {token.content: id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def _with_template(tokenizer: Tokenizer, single: str, pair: str) -> Tokenizer:
    """Set a template of special tokens, such as "[CLS] $A [SEP]"."""
    ids: list[tuple[str, int]] = []
    for name in sorted({name.split(":")[0] for name in f"{single} {pair}".split() if not name.startswith("$")}):
        id_ = tokenizer.token_to_id(name)
        if id_ is None:
            raise ImportFailedError(f"the vocabulary has no token {name!r}, which the tokenizer needs")
        ids.append((name, id_))
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, reader: TokenizerFiles) -> None:
    """Add the tokens that have ids after those of the vocabulary; another id is an error.

    They are those of added_tokens.json, and of `added_tokens_decoder` in tokenizer_config.json,
    which also has their options.
    """
    listed = reader.json("added_tokens.json") or {}
    if not isinstance(listed, dict) or not all(isinstance(id_, int) for id_ in listed.values()):
        raise ImportFailedError("added_tokens.json must be a JSON object of tokens and ids")
    tokens = {token: AddedToken(token, special=True, normalized=False) for token in listed}
    ids: dict[str, int] = dict(listed)
    for id_, token in _described_tokens(reader):
        if token.content in tokens or tokenizer.token_to_id(token.content) is None:
            tokens[token.content] = token
            ids.setdefault(token.content, id_)
    for name, id_ in sorted(ids.items(), key=lambda item: item[1]):
        if tokenizer.token_to_id(name) is None:
            token = tokens[name]
            (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        if tokenizer.token_to_id(name) != id_:
            file = "added_tokens.json" if name in listed else f"{TOKENIZER_CONFIG}: added_tokens_decoder"
            raise ImportFailedError(
                f"{file}: the token {name!r} must have the id {tokenizer.token_to_id(name)} after the vocabulary, got "
                f"{id_}"
            )


def _described_tokens(reader: TokenizerFiles) -> list[tuple[int, AddedToken]]:
    """Return the ids and tokens of `added_tokens_decoder`."""
    entries = reader.config.get("added_tokens_decoder") or {}
    options = ("single_word", "lstrip", "rstrip", "normalized", "special")
    try:
        return [
            (int(id_), AddedToken(entry["content"], **{key: entry[key] for key in options if key in entry}))
            for id_, entry in entries.items()
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ImportFailedError(
            f"{TOKENIZER_CONFIG}: added_tokens_decoder must map ids to objects with the content of a token"
        ) from None


# Conversions by model type


def _word_pieces(reader: TokenizerFiles, special: Sequence[str], template: tuple[str, str]) -> Tokenizer:
    lines = [line.rstrip("\r") for line in reader.lines("vocab.txt").removesuffix("\n").split("\n")]
    accents = reader.config.get("strip_accents")
    tokenizer = convert_word_pieces(
        lines,
        special,
        lowercase=reader.option("do_lower_case", True),
        strip_accents=None if accents is None else reader.option("strip_accents", False),
        split_chinese=reader.option("tokenize_chinese_chars", True),
    )
    return _with_template(tokenizer, *template)


_convert_bert = partial(_word_pieces, special=["[PAD]", "[CLS]", "[SEP]", "[MASK]"], template=BERT)


def _byte_level(reader: TokenizerFiles, special: Sequence[str]) -> Tokenizer:
    return convert_byte_level(
        reader.vocabulary("vocab.json"),
        reader.lines("merges.txt"),
        special,
        add_prefix_space=reader.option("add_prefix_space", False),
    )


def _convert_roberta(reader: TokenizerFiles) -> Tokenizer:
    return _with_template(_byte_level(reader, ROBERTA_TOKENS), *ROBERTA)


def _convert_gpt2(reader: TokenizerFiles) -> Tokenizer:
    """Convert the vocabulary of GPT-2 or OPT, whose texts can start and end with special tokens."""
    text_end = "<|endoftext|>"
    begin, end, unknown = (reader.special_token(key, text_end) for key in ("bos_token", "eos_token", "unk_token"))
    names = [begin, end, unknown, reader.special_token("pad_token")]
    tokenizer = _byte_level(reader, [name for name in names if name is not None])
    is_begun, is_ended = reader.option("add_bos_token", False), reader.option("add_eos_token", False)
    return _with_bounds(tokenizer, begin if is_begun else None, end if is_ended else None)


def _with_bounds(tokenizer: Tokenizer, begin: str | None, end: str | None) -> Tokenizer:
    """Let each text, and each of a pair, start and end with these special tokens."""
    text = " ".join(filter(None, (begin, "$A", end)))
    return tokenizer if text == "$A" else _with_template(tokenizer, text, f"{text} {text.replace('$A', '$B')}")


def _convert_qwen(reader: TokenizerFiles) -> Tokenizer:
    vocabulary, merges = reader.vocabulary("vocab.json"), reader.lines("merges.txt")
    return convert_byte_level(vocabulary, merges, ["<|endoftext|>"], words=QWEN_WORDS)


def _convert_t5(reader: TokenizerFiles) -> Tokenizer:
    """Convert the model of T5, whose last ids are `<extra_id_99>` to `<extra_id_0>`."""
    model = reader.sentencepiece("spiece.model")
    count = reader.option("extra_ids", 100 if reader.model_type == "t5" else 0)
    extra = [f"<extra_id_{index}>" for index in reversed(range(count))]
    tokenizer = convert_sentencepiece(model, _extended(model.ids, extra), special=["<pad>", END, *extra])
    return _with_template(tokenizer, f"$A {END}", f"$A {END} $B {END}")


def _convert_albert(reader: TokenizerFiles) -> Tokenizer:
    model = reader.sentencepiece("spiece.model")
    prefix: list[normalizers.Normalizer] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not reader.option("keep_accents", False):
        prefix += [normalizers.NFKD(), normalizers.StripAccents()]
    if reader.option("do_lower_case", True):
        prefix.append(normalizers.Lowercase())
    special = ["[CLS]", "[SEP]", "<pad>", "[MASK]"]
    tokenizer = convert_sentencepiece(model, special=special, prefix=prefix)
    return _with_template(tokenizer, *BERT)


def _convert_deberta(reader: TokenizerFiles) -> Tokenizer:
    """Convert the model of DeBERTa, whose mask has the id after the pieces.

    The model's own rules normalize a text, as in the training and in each tokenizer.json of
    transformers 4. Version 5 ignores the rules, and composes characters (NFC). Texts that are split
    at punctuation, as no known model does, are refused.
    """
    if reader.option("split_by_punct", False):
        raise ImportFailedError(
            f"{TOKENIZER_CONFIG}: split_by_punct true is not supported without {TOKENIZER}; save the tokenizer with "
            "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    model = reader.sentencepiece("spm.model")
    prefix = [normalizers.Lowercase()] if reader.option("do_lower_case", False) else []
    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = convert_sentencepiece(model, _extended(model.ids, ["[MASK]"]), special=special, prefix=prefix)
    return _with_template(tokenizer, *BERT)


def _convert_pegasus(reader: TokenizerFiles) -> Tokenizer:
    """Convert the model of Pegasus, whose ids are shifted for masks and unused tokens."""
    model = reader.sentencepiece("spiece.model")
    offset = reader.option("offset", 103)
    first = ["<pad>", END, "<mask_1>", "<mask_2>", *(f"<unk_{index}>" for index in range(2, offset))]
    normal = [piece.text for piece in model.pieces if piece.kind not in (PieceKind.CONTROL, PieceKind.UNKNOWN)]
    ids = _extended({}, [*first, model.unknown, *normal])
    if any(ids[text] != model.ids[text] + offset for text in (model.unknown, *normal)):
        raise ImportFailedError(f"spiece.model: the ids from <unk> on must be {offset} less than those of Pegasus")
    tokenizer = convert_sentencepiece(model, ids, special=first)
    return _with_template(tokenizer, *ENDED)


def _convert_llama(reader: TokenizerFiles) -> Tokenizer:
    tokenizer = convert_sentencepiece(reader.sentencepiece("tokenizer.model"))
    begin = "<s>" if reader.option("add_bos_token", True) else None
    end = END if reader.option("add_eos_token", False) else None
    return _with_bounds(tokenizer, begin, end)


def _convert_mbart(reader: TokenizerFiles) -> Tokenizer:
    is_50 = reader.config.get("tokenizer_class") in ("MBart50Tokenizer", "MBart50TokenizerFast")
    listed = language_tokens(reader.additional_special_tokens())
    return _fairseq(reader, listed or (MBART_50 if is_50 else MBART))


def _convert_m2m(reader: TokenizerFiles) -> Tokenizer:
    """Convert the model of NLLB, or that of M2M100, whose ids are in vocab.json."""
    if reader.data("vocab.json") is None:
        languages = language_tokens(reader.additional_special_tokens())
        if not languages:
            raise ImportFailedError(
                f"the checkpoint has no {TOKENIZER} and no vocab.json, and special_tokens_map.json does not list the "
                "language tokens of NLLB; download them"
            )
        return _fairseq(reader, languages)
    model = reader.sentencepiece("sentencepiece.bpe.model")
    name = reader.config.get("language_codes") or "m2m100"
    if name not in M2M100:
        raise ImportFailedError(f"{TOKENIZER_CONFIG}: language_codes must be one of {', '.join(M2M100)}")
    languages = [f"__{code}__" for code in M2M100[name]]
    ids = _extended(reader.vocabulary("vocab.json"), languages)
    tokenizer = convert_sentencepiece(model, ids, special=["<s>", "<pad>", END, *languages])
    return _with_template(tokenizer, *ENDED)


def _fairseq(reader: TokenizerFiles, languages: Sequence[str], template: tuple[str, str] = ENDED) -> Tokenizer:
    """Convert a model with the ids of fairseq: special tokens, the pieces, languages, the mask."""
    model, special = reader.sentencepiece("sentencepiece.bpe.model"), ROBERTA_TOKENS[:-1]
    pieces = [piece.text for piece in model.pieces if piece.text not in special]
    ids = _extended({}, [*special, *pieces, *languages, "<mask>"])
    return _with_template(convert_sentencepiece(model, ids, special=["<pad>", *languages, "<mask>"]), *template)


def _convert_marian(reader: TokenizerFiles) -> ConvertedTokenizers:
    """Convert the two models of Marian.

    The ids of both are in vocab.json, which can have pieces of both languages. The target has its
    own ids if target_vocab.json exists. Tokens such as `>>fra<<` choose the target language.

    The ids are those of transformers, with two exceptions. A language token is found anywhere in a
    text, not only at its start. Characters that a model does not know are always `<unk>`, although
    vocab.json can have an id for them from the other language.
    """
    source_ids = reader.vocabulary("vocab.json")
    has_target_ids = reader.data("target_vocab.json") is not None
    target_ids = reader.vocabulary("target_vocab.json") if has_target_ids else source_ids
    source, target = reader.sentencepiece("source.spm"), reader.sentencepiece("target.spm")
    codes = [] if has_target_ids else [token for token in source_ids if token.startswith(">>") and token.endswith("<<")]
    tokenizers = []
    for model, ids, own_codes in ((source, source_ids, codes), (target, target_ids, [])):
        special = [END, *(["<pad>"] if "<pad>" in ids else [])]
        tokenizer = convert_sentencepiece(model, ids, special=special, codes=own_codes)
        tokenizers.append(_with_template(tokenizer, *ENDED))
    languages = language_ids({code: source_ids[code] for code in codes})
    return ConvertedTokenizers(tokenizers[0], tokenizers[1], languages)


def _extended(ids: Mapping[str, int], tokens: Sequence[str]) -> dict[str, int]:
    """Return ids with tokens after the others; tokens that are already there keep their id."""
    extended = dict(ids)
    for token in tokens:
        extended.setdefault(token, len(extended))
    return extended


CONVERSIONS: dict[str, Callable[[TokenizerFiles], Tokenizer]] = {
    "albert": _convert_albert,
    "bart": _convert_roberta,
    "bert": _convert_bert,
    "deberta-v2": _convert_deberta,
    "distilbert": _convert_bert,
    "electra": _convert_bert,
    "gpt2": _convert_gpt2,
    "llama": _convert_llama,
    "m2m_100": _convert_m2m,
    "mbart": _convert_mbart,
    "mistral": _convert_llama,
    "mpnet": partial(_word_pieces, special=ROBERTA_TOKENS, template=ROBERTA),
    "mt5": _convert_t5,
    "opt": _convert_gpt2,
    "pegasus": _convert_pegasus,
    "qwen2": _convert_qwen,
    "qwen3": _convert_qwen,
    "roberta": _convert_roberta,
    "t5": _convert_t5,
    "xlm-roberta": partial(_fairseq, languages=(), template=ROBERTA),
}
