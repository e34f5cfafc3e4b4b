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
    """Yield the texts of records that are short enough for a tokenizer."""
    texts = (text for record in records for text in texts_of(record))
    return (text for text in texts if len(text) <= MAX_LEARNT_CHARACTERS)


def choose_halvings(texts: Iterable[str], seed: int, max_word_bytes: int) -> int:
    """Return how often to halve texts so that different words have at most `max_word_bytes`."""
    # For each word, the smallest hash of a text that has it: the word is in all samples whose
    # hashes reach that far.
    smallest, num_bytes, halvings = dict[str, int](), 0, 0
    for text in texts:
        number = _hash(text, seed)
        if number >> (64 - halvings):
            continue
        for word in text.split():
            known = smallest.get(word)
            if known is None:
                num_bytes += len(word.encode())
            if known is None or number < known:
                smallest[word] = number
        while num_bytes > max_word_bytes and halvings < 64:
            halvings += 1
            smallest = {word: text_hash for word, text_hash in smallest.items() if not text_hash >> (64 - halvings)}
            num_bytes = sum(len(word.encode()) for word in smallest)
    return halvings


def sample(texts: Iterable[str], seed: int, halvings: int) -> Iterator[str]:
    """Yield the texts of the sample in their order; equal texts are all in it, or none is."""
    return (text for text in texts if not _hash(text, seed) >> (64 - halvings))


def learnt_texts(read: Callable[[], Iterable[str]], num_bytes: int, seed: int) -> tuple[Iterable[str], int]:
    """Return the texts to train a tokenizer on, and how often their number was halved. `read`
    returns all texts each time it is called. `num_bytes` is the most bytes that they can have; few
    texts are not read for a sample.
    """
    halvings = choose_halvings(read(), seed, MAX_WORD_BYTES) if num_bytes > MAX_WORD_BYTES else 0
    return (sample(read(), seed, halvings) if halvings else read()), halvings


def _hash(text: str, seed: int) -> int:
    # The division into train and dev uses the hash without the first text.
    return hash_texts(("tokenizer", text), seed)
