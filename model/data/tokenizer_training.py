"""Byte-level BPE tokenizer (Sennrich et al. 2016) shared by source and target.

It is trained with the `tokenizers` library. Its alphabet is all bytes, so that every text can be
encoded and there is no unknown token. Encoding adds a leading space, so that a word has the same
token at the start of a sentence and within it; `decode_ids` removes the space.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from sightline.base.errors import UsageError
from sightline.model.config import SPECIAL_IDS, ArchitectureConfig, PretrainedConfig

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SPECIAL_TOKENS = (PAD, BOS, EOS)  # ids 0, 1, 2, as in ArchitectureConfig; in the order of SPECIAL_IDS

# Training time grows with the square of the length of a word, so that one long line without spaces
# could take hours.
MAX_LEARNT_CHARACTERS = 10_000
BATCH_CHARACTERS = 2**20  # of lines that are encoded at once, unless one line has more


def train_tokenizer(lines: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Train a tokenizer on untokenized lines of all languages; lines longer than
    `MAX_LEARNT_CHARACTERS` are skipped.

    Args:
        vocab_size: number of tokens, including the special tokens and the 256 bytes; at least 259,
            otherwise a `ValueError` is raised. The tokenizer has fewer tokens if the lines do not
            have enough pairs to merge.
        special_tokens: further special tokens, such as those of a chat format. Their ids follow
            those of `SPECIAL_TOKENS`. A text that contains their names is encoded as text.
    """
    specials = [*SPECIAL_TOKENS, *special_tokens]
    smallest = len(specials) + len(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < smallest:
        raise ValueError(f"vocab_size must be at least {smallest} (bytes and special tokens), got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((line for line in lines if len(line) <= MAX_LEARNT_CHARACTERS), trainer)
    return _adding(tokenizer, EOS, f"$A {EOS}")  # the start token is an input of the decoder


def _adding(tokenizer: Tokenizer, token: str, template: str) -> Tokenizer:
    """Let a tokenizer add a special token to a text, and encode names of such tokens as text."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(token, tokenizer.token_to_id(token))]
    )
    tokenizer.encode_special_tokens = True
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a `tokenizer.json` without its truncation and padding. Special tokens in a text are
    encoded as text, which the file does not store. Raises `ValueError` for another file.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # the library raises bare exceptions, and panics
        raise ValueError(f"{path} is not a tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


# Names of the special tokens in third-party tokenizers, by our name.
OTHER_NAMES: Mapping[str, Sequence[str]] = {
    PAD: ("[PAD]", "<|pad|>", "<|padding|>"),
    BOS: ("[CLS]", "<bos>", "[BOS]", "<|begin_of_text|>", "<|startoftext|>"),
    EOS: ("[SEP]", "<eos>", "[EOS]", "<|end_of_text|>", "<|endoftext|>"),
}


def adapt_tokenizer(tokenizer: Tokenizer, task: str, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Return a copy of a third-party tokenizer, adapted to training.

    The padding, start and end token get the names of `SPECIAL_TOKENS` and keep their ids. Encoding
    adds the end token to a text, and nothing else; names of special tokens, such as the further
    ones of a chat format, are text. Raises `UsageError`, with the name of the task, if a special
    token is missing or the ids have gaps.
    """
    document = json.loads(tokenizer.to_str())
    added = {token["content"]: token for token in document["added_tokens"] if token["special"]}
    new_names, missing = dict[str, str](), list[str]()
    for name in (*SPECIAL_TOKENS, *special_tokens):
        candidates = (name, *OTHER_NAMES.get(name, ()))
        known = next((candidate for candidate in candidates if candidate in added), None)
        if known is None:
            missing.append(" or ".join(candidates))
        else:
            new_names[known] = name
    if missing:
        raise UsageError(
            f"the tokenizer cannot be used for the task {task}: it lacks the special tokens {'; '.join(missing)}; add "
            "them to it as special tokens, or omit --tokenizer to train a tokenizer on the data"
        )
    ids = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
    if ids[-1] >= len(ids):
        raise UsageError(
            f"the tokenizer cannot be used: it has {len(ids)} tokens, but ids up to {ids[-1]}; number them from 0 on"
        )
    for token in document["added_tokens"]:
        if token["content"] in new_names:
            token |= {"content": new_names[token["content"]], "lstrip": False, "rstrip": False}
    vocabulary = document["model"]["vocab"]
    if isinstance(vocabulary, dict):
        document["model"]["vocab"] = {new_names.get(token, token): id_ for token, id_ in vocabulary.items()}
    else:  # a Unigram model has tokens with their scores, in the order of their ids
        document["model"]["vocab"] = [[new_names.get(token, token), cost] for token, cost in vocabulary]
    adapted = Tokenizer.from_str(json.dumps({**document, "post_processor": None}))
    adapted.no_padding()
    adapted.no_truncation()
    return _adding(adapted, EOS, f"$A {EOS}")


def token_fields(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the fields of ArchitectureConfig that a trained or adapted tokenizer determines."""
    ids = {name: special_id(tokenizer, token) for name, token in zip(SPECIAL_IDS, SPECIAL_TOKENS, strict=True)}
    return {"vocab_size": tokenizer.get_vocab_size(), **ids}


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a special token, or raise `UsageError`."""
    id_ = tokenizer.token_to_id(token)
    if id_ is None:
        raise UsageError(f"the tokenizer lacks the special token {token}; add it, or use another tokenizer")
    return id_


def check_tokenizer(tokenizer: Tokenizer, config: ArchitectureConfig) -> None:
    """Check that a configuration matches a tokenizer, or raise `ValueError`. The special tokens of
    a tokenizer that others trained may have any ids.
    """
    own = [] if isinstance(config, PretrainedConfig) else zip(SPECIAL_IDS, SPECIAL_TOKENS, strict=True)
    for name, token in own:
        if getattr(config, name) != tokenizer.token_to_id(token):
            raise ValueError(
                f"{name} is {getattr(config, name)} in the configuration, but {token} has the id "
                f"{tokenizer.token_to_id(token)} in the tokenizer; use both files from the same training run"
            )
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens, but vocab_size is {config.vocab_size}; use the "
            "configuration and the tokenizer of the same training run"
        )


def prompt_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy for prompts: it adds the start token at the beginning and no end token."""
    return _adding(Tokenizer.from_str(tokenizer.to_str()), BOS, f"{BOS} $A")


def encode_lines(tokenizer: Tokenizer, lines: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each line with the special tokens that the tokenizer adds. The
    encodings of a batch take up to 180 bytes of memory for each character, and their ids 20.
    """
    return [encoding.ids for batch in batches(lines) for encoding in tokenizer.encode_batch_fast(batch)]


def batches(lines: Sequence[str]) -> Iterator[list[str]]:
    """Yield lines of about `BATCH_CHARACTERS` at once."""
    ends = accumulate(map(len, lines))
    return (list(batch) for _, batch in groupby(lines, key=lambda line: next(ends) // BATCH_CHARACTERS))


def truncate(tokenizer: Tokenizer, ids: Sequence[int], max_tokens: int) -> list[int]:
    """Return the first ids of an encoded text; special tokens at its end are kept, as the service
    does (`TextTokenizer.encode_truncated`).
    """
    if len(ids) <= max_tokens:
        return list(ids)
    is_added = tokenizer.encode("a").special_tokens_mask
    num_final = min(next((index for index, one in enumerate(reversed(is_added)) if not one), 0), max_tokens)
    return [*ids[: max_tokens - num_final], *ids[len(ids) - num_final :]]


def decode_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Decode token ids to text without special tokens and the leading space."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
    return text.removeprefix(" ")
