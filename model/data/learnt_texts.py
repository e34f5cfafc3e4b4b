"""Texts that a tokenizer is trained on: all, or a sample if they have many different words.

The training of a tokenizer holds each different word in memory, about 130 bytes for each of its
bytes. A sample bounds this, whatever the number of texts. A word is a part between white space, so
that in languages without spaces each sentence is one.
"""

from collections.abc import Callable, Iterable, Iterator

from sightline.model.data.corpus import hash_texts
from sightline.model.data.records import Record, texts_of
from sightline.model.data.tokenizer_training import MAX_LEARNT_CHARACTERS

MAX_WORD_BYTES = 1_500_000  # of the different words of a sample


def read_texts(records: Iterable[Record]) -> Iterator[str]:
    """Return the texts of records that are short enough for a tokenizer."""
    texts = (text for record in records for text in texts_of(record))
    return (text for text in texts if len(text) <= MAX_LEARNT_CHARACTERS)


def learnt_texts(read: Callable[[], Iterable[str]], num_bytes: int, seed: int) -> tuple[Iterable[str], int]:
    """Return the texts to train a tokenizer on, and how often their number was halved so that their
    different words have at most `MAX_WORD_BYTES`. `read` returns all texts each time it is called.
    `num_bytes` is the most bytes that they can have; few texts are not read for a sample.
    """
    halvings = 0
    while num_bytes > MAX_WORD_BYTES and not _have_few_words(sample(read(), seed, halvings)):
        halvings += 1
    return sample(read(), seed, halvings), halvings


def sample(texts: Iterable[str], seed: int, halvings: int) -> Iterable[str]:
    """Return the texts of the sample in their order; equal texts are all in it, or none is."""
    # The division into train and dev uses the hash without the first text.
    return (text for text in texts if halvings == 0 or hash_texts(("tokenizer", text), seed) >> (64 - halvings) == 0)


def _have_few_words(texts: Iterable[str]) -> bool:
    words, num_bytes = set[str](), 0
    for text in texts:
        new = set(text.split()) - words
        num_bytes += sum(len(word.encode()) for word in new)
        if num_bytes > MAX_WORD_BYTES:
            return False
        words |= new
    return True
