"""Byte-level BPE tokenizer (Sennrich et al. 2016) shared by source and target.

It is trained with the `tokenizers` library. Its alphabet is all bytes, so that every text can be
encoded and there is no unknown token. Encoding adds a leading space, so that a word has the same
token at the start of a sentence and within it; `decode_ids` removes the space.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from model.config import SPECIAL_IDS, ModelConfig

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SPECIAL_TOKENS = (PAD, BOS, EOS)  # ids 0, 1, 2, as in ModelConfig; in the order of SPECIAL_IDS

# Training time grows with the square of the length of a word, so that one long line without spaces
# could take hours.
MAX_LEARNT_CHARACTERS = 10_000


def train_tokenizer(lines: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer on lines of both languages.

    Args:
        lines: untokenized sentences; lines longer than `MAX_LEARNT_CHARACTERS` are skipped.
        vocab_size: number of tokens, including the special tokens and the 256 bytes; at least 259.
            The tokenizer has fewer tokens if the lines do not have enough pairs to merge.

    Raises:
        ValueError: vocab_size is too small.
    """
    smallest = len(SPECIAL_TOKENS) + len(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < smallest:
        raise ValueError(f"vocab_size must be at least {smallest} (bytes and special tokens), got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((line for line in lines if len(line) <= MAX_LEARNT_CHARACTERS), trainer)
    # A source ends with the end token. The start token is an input of the decoder, not part of the
    # text.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, tokenizer.token_to_id(EOS))]
    )
    # A special token that occurs in the text, such as "</s>", is encoded as text.
    tokenizer.encode_special_tokens = True
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a `tokenizer.json` and set `encode_special_tokens`, which the file does not store.

    Raises:
        ValueError: the file is not a tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        raise ValueError(f"{path} is not a tokenizer: {error}") from error
    tokenizer.encode_special_tokens = True
    return tokenizer


def check_tokenizer(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Check that a configuration matches a tokenizer.

    Raises:
        ValueError: a special token has another id, or the tokenizer has more tokens than the model.
    """
    for name, token in zip(SPECIAL_IDS, SPECIAL_TOKENS, strict=True):
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
    other = Tokenizer.from_str(tokenizer.to_str())
    other.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, other.token_to_id(BOS))]
    )
    other.encode_special_tokens = True
    return other


def encode_lines(tokenizer: Tokenizer, lines: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each line with the special tokens that the tokenizer adds."""
    return [encoding.ids for encoding in tokenizer.encode_batch(list(lines))]


def decode_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Decode token ids to text without special tokens and the leading space."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
    return text.removeprefix(" ")
