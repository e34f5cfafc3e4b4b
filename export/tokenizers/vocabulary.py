"""Tokenizers from text files: WordPiece (vocab.txt), byte-level BPE (vocab.json and merges.txt)."""

from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from sightline.export.import_errors import ImportFailedError

UNKNOWN = "[UNK]"  # token of BERT for unknown words


def convert_word_pieces(
    lines: Sequence[str],
    special: Sequence[str],
    *,
    lowercase: bool = True,
    strip_accents: bool | None = None,
    split_chinese: bool = True,
) -> Tokenizer:
    """Convert the vocabulary of a BERT model to a tokenizer without a template.

    Args:
        lines: tokens in the order of their ids, as in `vocab.txt`. None may stand twice.
        special: special tokens; those that are not in the vocabulary are ignored.
        strip_accents: remove accents; None does so if `lowercase` is true.
        split_chinese: make each Chinese character a word.
    """
    vocabulary = {token: id_ for id_, token in enumerate(lines)}
    if len(vocabulary) < len(lines):
        raise ImportFailedError("vocab.txt has a token twice, so that its line is not its id")
    if UNKNOWN not in vocabulary:
        raise ImportFailedError(f"vocab.txt has no token {UNKNOWN!r} for unknown words")
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=split_chinese, strip_accents=strip_accents, lowercase=lowercase
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    known = [token for token in (UNKNOWN, *special) if token in vocabulary]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in known])
    return tokenizer


def convert_byte_level(
    vocabulary: Mapping[str, int],
    merges: str,
    special: Sequence[str],
    *,
    add_prefix_space: bool = False,
    words: str | None = None,
) -> Tokenizer:
    """Convert the vocabulary of a GPT-2, OPT or Qwen model to a tokenizer without a template.

    Args:
        vocabulary: tokens and their ids, as in `vocab.json`.
        merges: content of `merges.txt`: two tokens separated by a space on each line, in the order
            in which they are merged. A first line with the version is skipped.
        special: special tokens; those that are not in the vocabulary are ignored.
        add_prefix_space: insert a space before a text.
        words: regular expression of the words that are tokenized on their own, in texts of which
            characters are composed (NFC); None for that of GPT-2.
    """
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(merges.splitlines(), 1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, separator, right = line.partition(" ")
        if not separator or " " in right:
            raise ImportFailedError(f"merges.txt: line {number} must have two tokens separated by a space")
        if not {left, right, left + right} <= vocabulary.keys():
            raise ImportFailedError(f"merges.txt: line {number} has a token that is not in vocab.json")
        pairs.append((left, right))
    tokenizer = Tokenizer(models.BPE(dict(vocabulary), pairs))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=words is None)
    if words is None:
        tokenizer.pre_tokenizer = byte_level
    else:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    known = [token for token in special if token in vocabulary]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in known])
    return tokenizer
