"""Byte-level BPE (Sennrich et al. 2016) shared by source and target, trained with the `tokenizers` library.

Bytes are its alphabet, so every string can be written and no token is unknown. A space is put before the text, so
that a word is the same token at the start of a sentence and within; `decode` takes it away again.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from model.config import SPECIAL_IDS, ModelConfig

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SPECIAL_TOKENS = (PAD, BOS, EOS)  # ids 0, 1, 2, as in ModelConfig; in the order of SPECIAL_IDS


# Learning takes time that grows with the square of a word's length: one line without blanks could take hours.
MAX_LEARNT_CHARACTERS = 10_000


def train_tokenizer(lines: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn merges from both sides' lines.

    Args:
        lines: sentences, untokenised; those longer than `MAX_LEARNT_CHARACTERS` are left out.
        vocab_size: special tokens and the 256 bytes included; at least 259.
    """
    smallest = len(SPECIAL_TOKENS) + len(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < smallest:
        raise ValueError(f"vocab_size is {vocab_size}, bytes and special tokens alone need {smallest}")
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
    # A source ends with the end token. The decoder's start token is the engine's to add, not the tokenizer's.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, tokenizer.token_to_id(EOS))]
    )
    # Text that spells a special token ("</s>") is text.
    tokenizer.encode_special_tokens = True
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`; the switch that treats special tokens in text as text is not stored in it.

    Raises:
        ValueError: it is not one.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        raise ValueError(f"{path} is not a tokenizer: {error}") from error
    tokenizer.encode_special_tokens = True
    return tokenizer


def check_tokenizer(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Check that a configuration has the ids of a tokenizer.

    Raises:
        ValueError: a special token has another id, or an id exceeds the model's vocabulary.
    """
    for name, token in zip(SPECIAL_IDS, SPECIAL_TOKENS, strict=True):
        if getattr(config, name) != tokenizer.token_to_id(token):
            raise ValueError(
                f"{name} is {getattr(config, name)} in the configuration, but the tokenizer gives {token} the id "
                f"{tokenizer.token_to_id(token)}; use the configuration and the tokenizer of one training"
            )
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens, but vocab_size is {config.vocab_size}; use the "
            "configuration and the tokenizer of one training"
        )


def prompt_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """One that differs in this: a text begins with the start token, and does not end."""
    other = Tokenizer.from_str(tokenizer.to_str())
    other.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, other.token_to_id(BOS))]
    )
    other.encode_special_tokens = True
    return other


def encode_lines(tokenizer: Tokenizer, lines: Sequence[str]) -> list[list[int]]:
    """Token ids of each line, with the tokenizer's own special tokens: the end token last, see `train_tokenizer`."""
    return [encoding.ids for encoding in tokenizer.encode_batch(list(lines))]


def decode_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of token ids, special tokens and the leading space left out."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
    return text.removeprefix(" ")
