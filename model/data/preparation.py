"""Encoded examples of a corpus, in the folder of a run.

A corpus is read as a stream, and encoded anew for each start of a run.
"""

import hashlib
import json
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, compress, islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from sightline.base.errors import UsageError
from sightline.model.data.corpus import Corpus, Split, hash_texts
from sightline.model.data.examples import DiskExamples, Example, ExampleWriter, TrainingData
from sightline.model.data.facts import Facts, measure
from sightline.model.data.files import CorpusError
from sightline.model.data.records import Record, TaskName, texts_of
from sightline.model.data.similar_texts import MARK, truncated
from sightline.model.data.tokenizer_training import truncate

FOLDER = "data"  # of the encoded examples, in the folder of a run
MAX_DEV_RECORDS = 1_000  # of `Prepared.dev_records`
_CHUNK = 1_000  # records that are encoded at once

Encode = Callable[[Tokenizer, Sequence[Record]], list[Example]]
Shorten = Callable[[Sequence[int]], list[int]]  # truncates the ids of a text that is too long

# Lists of an example that are token ids, if they are not only the first.
_SIDES: Mapping[TaskName, tuple[int, ...]] = {"translation": (0, 1), "encoder": (0, 1)}
# Truncation of an example whose model need not read all of a text; others are dropped.
_TRUNCATE: Mapping[TaskName, Callable[[Example, Shorten], Example]] = {
    "classification": lambda example, shorten: (shorten(example[0]), example[1]),
    "encoder": truncated,
}


@dataclass(frozen=True, kw_only=True)
class Prepared(TrainingData):
    """Encoded corpus. Records of dev are at most 1,000, at equal distances."""

    facts: Facts


def prepare(
    run: Path,
    corpus: Corpus,
    facts: Facts,
    tokenizer: Tokenizer,
    encode: Encode,
    max_length_tokens: int,
) -> Prepared:
    """Encode a corpus and write the examples of train and dev to the folder of a run.

    Args:
        encode: returns the examples of records in their order, one or more for each.
        max_length_tokens: length of the longest example. Longer texts of `TRUNCATED_TASKS` are
            truncated; longer examples of other tasks are dropped, unless all of a split are.

    Raises:
        CorpusError: all examples of a split are too long, or a file changed.
    """
    folder, names = run / FOLDER, [split.name for split in corpus.splits]
    splits = {split.name: _SplitEncoder(split, facts, tokenizer, encode, max_length_tokens) for split in corpus.splits}
    with _emptied(folder):
        for name in reversed(names):  # train is the last, because it takes long
            splits[name].write(folder)
        for path in folder.glob("test.*"):  # only train and dev are read
            path.unlink()
    uses, digests = {name: splits[name].token_uses for name in names}, [splits[name].digest for name in names[:2]]
    prepared_facts = replace(
        facts,
        examples={name: splits[name].sizes.total() for name in names},
        dropped={name: {**facts.dropped[name], "too long": splits[name].num_dropped} for name in names},
        truncated={name: splits[name].num_truncated for name in names},
        tokens={name: measure(splits[name].sizes) for name in names},
        max_length_tokens=max_length_tokens,
        coverage={name: float(uses[name][uses["train"] > 0].sum() / uses[name].sum()) for name in names[1:]},
    )
    digest = hashlib.sha256(json.dumps([list(facts.labels), *digests]).encode()).hexdigest()
    train, dev = DiskExamples(folder, "train"), DiskExamples(folder, "dev")
    return Prepared(tokenizer, train, dev, digest, _sample(corpus.dev, facts.examples["dev"]), facts=prepared_facts)


@contextmanager
def _emptied(folder: Path) -> Iterator[None]:
    """Replace a folder by an empty one, which is removed on failure."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        yield
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise OSError(f"cannot write {folder}: {error.strerror or error}") from error
        raise


def _sample(dev: Split, num_records: int) -> list[Record]:
    """Return `MAX_DEV_RECORDS` records at equal distances, or all."""
    num_sampled = min(num_records, MAX_DEV_RECORDS)
    sampled = {index * num_records // num_sampled for index in range(num_sampled)}
    return [record for index, record in enumerate(dev) if index in sampled]


class _SplitEncoder:
    """Writes the examples of a split to files, and counts them."""

    def __init__(
        self, split: Split, facts: Facts, tokenizer: Tokenizer, encode: Encode, max_length_tokens: int
    ) -> None:
        self._split, self._tokenizer, self._encode, self._limit = split, tokenizer, encode, max_length_tokens
        self._num_records = facts.examples[split.name]
        self._is_deduplicated = facts.task == "encoder" and split.name == "train"
        self._sides, self._truncate = _SIDES.get(facts.task, (0,)), _TRUNCATE.get(facts.task)
        self.digest, self.num_dropped, self.num_truncated = "", 0, 0
        self.sizes = Counter[int]()  # numbers of examples by their number of tokens
        self.token_uses = np.zeros(max(tokenizer.get_vocab().values()) + 1, np.int64)  # by token id

    def write(self, folder: Path) -> None:
        """Write the examples. Raises `CorpusError` as `prepare` does."""
        split, num_read = self._split, 0
        records = _without_repeated(split) if self._is_deduplicated else iter(split)
        with ExampleWriter(folder, split.name) as writer:
            while chunk := list(islice(records, _CHUNK)):
                writer.add(self._fitting(self._encoded(chunk)))
                num_read += len(chunk)
        self.digest = writer.digest()
        if num_read != self._num_records:
            raise CorpusError(f"{split} changed while it was read; start again when it is complete")
        if not self.sizes:
            raise CorpusError(
                f"{split} has no example of at most {self._limit} tokens; shorten the texts, or increase "
                "--max-length-tokens"
            )

    def _encoded(self, records: Sequence[Record]) -> list[Example]:
        """Return the examples of records. Raises `CorpusError` with the line of the first one that
        cannot be encoded.
        """
        try:
            return self._encode(self._tokenizer, records)
        except UsageError:
            for record in records:
                try:
                    self._encode(self._tokenizer, [record])
                except UsageError as error:
                    line = next(number for number, other in self._split.numbered() if other == record)
                    raise CorpusError(f"{self._split.line(line)}: {error}") from None
            raise

    def _fitting(self, examples: Sequence[Example]) -> list[Example]:
        """Return the examples without those that are too long, or with these truncated."""
        fitting = list[Example]()
        for example in examples:
            if self._size(example) > self._limit:
                if self._truncate is None:
                    self.num_dropped += 1
                    continue
                whole = example
                example = self._truncate(example, self._shorten)
                self.num_truncated += example != whole
            self.sizes[self._size(example)] += 1
            fitting.append(example)
        ids = np.fromiter(chain.from_iterable(example[side] for example in fitting for side in self._sides), np.int64)
        self.token_uses += np.bincount(ids[ids < MARK], minlength=len(self.token_uses))
        return fitting

    def _size(self, example: Example) -> int:
        """Return the number of tokens of an example; that of a pair is the larger one."""
        return max(len(example[side]) for side in self._sides)

    def _shorten(self, ids: Sequence[int]) -> list[int]:
        return truncate(self._tokenizer, ids, self._limit)


def _without_repeated(split: Split) -> Iterator[Record]:
    hashes = array("Q", (hash_texts(texts_of(record)) for record in split))
    _, first = np.unique(np.frombuffer(hashes, np.uint64), return_index=True)
    is_first = np.zeros(len(hashes), bool)
    is_first[first] = True
    return compress(split, is_first)
