"""Memory that pairs take in `sightline train`, from reading to the batches of an epoch.

    python -m tests.model.data.memory PAIRS [WORDS]

writes pairs of 8 to 16 words in a temporary folder, and prints for each phase how far the memory of
the process grew at most since the start, in MB. Words are random letters, whose frequencies follow
Zipf's law. It needs Linux.
"""

import json
import multiprocessing
import random
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from sightline.model.data.batches import bucket
from sightline.model.data.corpus import open_corpus
from sightline.model.data.encoding import encode
from sightline.model.data.facts import check_corpus
from sightline.model.data.formats import Reading
from sightline.model.data.learnt_texts import learnt_texts, read_texts
from sightline.model.data.preparation import prepare
from sightline.model.data.tokenizer_training import train_tokenizer
from sightline.model.training.recipe import choose_vocabulary, num_characters

MAX_LENGTH_TOKENS = 128
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def write_pairs(folder: Path, num_pairs: int, num_words: int, seed: int = 1) -> None:
    """Write `train.de` and `train.en`."""
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    words = set[str]()
    while len(words) < num_words:
        words.add("".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 12))))
    shares = np.cumsum(1 / np.arange(1, num_words + 1))
    for language in ("de", "en"):
        with (folder / f"train.{language}").open("w", encoding="utf-8") as file:
            file.writelines(_lines(sorted(words), shares / shares[-1], num_pairs, rng))


def _lines(
    words: Sequence[str], shares: NDArray[np.float64], num_lines: int, rng: np.random.Generator
) -> Iterator[str]:
    for length in rng.integers(8, 17, num_lines).tolist():
        yield " ".join(words[index] for index in np.searchsorted(shares, rng.random(length)).tolist()) + "\n"


def measure(data: Path, run: Path) -> Iterator[tuple[str, float]]:
    """Yield the name of each phase, and the largest growth of the memory in it in MB."""

    def peak() -> float:
        """Return the largest memory since the last call in MB."""
        (kibibytes,) = re.findall(r"VmHWM:\s+(\d+) kB", STATUS.read_text(encoding="utf-8"))
        RESET.write_text("5", encoding="utf-8")
        return int(kibibytes) * 1024 / 1e6

    peak()
    before = peak()
    corpus = open_corpus(data, Reading("translation", "de", "en"))
    facts = check_corpus(corpus)
    yield "checked", peak() - before
    texts, _ = learnt_texts(lambda: read_texts(corpus.train), 4 * num_characters(facts), seed=1)
    tokenizer = train_tokenizer(texts, choose_vocabulary(facts)[0])
    yield "tokenizer trained", peak() - before
    encoder = partial(encode, labels=(), max_length_tokens=MAX_LENGTH_TOKENS)
    prepared = prepare(run, corpus, facts, tokenizer, encoder, MAX_LENGTH_TOKENS)
    yield "encoded", peak() - before
    batches = bucket(prepared.train.lengths, 4096, seed=1)
    assert sum(map(len, batches)) == len(prepared.train)
    yield "batches of an epoch", peak() - before


def main(arguments: Sequence[str]) -> None:
    num_pairs, num_words = int(arguments[0]), int((*arguments, "200000")[1])
    with TemporaryDirectory() as folder:
        data = Path(folder, "data")
        data.mkdir()
        # In another process, so that this one has no freed memory that it could use again.
        writer = multiprocessing.get_context("spawn").Process(target=write_pairs, args=(data, num_pairs, num_words))
        writer.start()
        writer.join()
        for phase, grown in measure(data, Path(folder, "run")):
            sys.stdout.write(json.dumps({"phase": phase, "mb": round(grown)}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
