"""Checks of a corpus before training, and its encoded examples in the folder of a run.

`check_corpus` reads all records once and needs no tokenizer; `prepare` encodes them. Both read
streams. In memory are 8 bytes for each record (16 for a labelled text and for a pair), with copies
while they are sorted up to 60, and tables whose sizes do not depend on the number of records.
"""

import dataclasses
import hashlib
import json
import math
import re
import shutil
import tempfile
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import compress, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from sightline.base.errors import UsageError
from sightline.base.text.tokenizer_parts import byte_alphabet
from sightline.model.data.corpus import Corpus, Split, check_number_of_labels, distinct, hash_texts
from sightline.model.data.examples import DiskExamples, Example, ExampleWriter, TrainingData, flatten, lengths_of
from sightline.model.data.files import CorpusError
from sightline.model.data.formats import PAIR_TASKS, describe_columns
from sightline.model.data.pair_checks import pair_warnings
from sightline.model.data.records import (
    TRUNCATED_TASKS,
    DialogueRecord,
    LabelledRecord,
    PairRecord,
    Record,
    TaggedRecord,
    TaskName,
    texts_of,
)
from sightline.model.data.similar_texts import LAST_MARK, MARK, SCORE_UNIT, limits_of, longest_text, truncated
from sightline.model.data.tags import tags_of
from sightline.model.data.tokenizer_training import truncate

FOLDER = "data"  # of the encoded examples, in the folder of a run
CONTRADICTIONS = "contradictions.txt"  # texts with different labels, in the folder of a run
MAX_DEV_RECORDS = 1_000  # of `Prepared.dev_records`
MIN_COVERAGE = 0.98  # share of the tokens of dev below which a warning is due
MIN_LABEL_EXAMPLES = 5
MIN_DEV_EXAMPLES = 10
MAX_DROPPED = 0.05  # share of train above which a warning is due
MAX_LISTED = 20  # labels in a line
MAX_LISTED_TEXTS = 10  # texts with different labels in the summary
MAX_LISTED_LINES = 5  # of a text and a label
MAX_CONTRADICTIONS = 1_000  # texts with different labels that are kept

_VERSION = 1  # of the files in FOLDER
_RESULT = "result.json"
_CHUNK = 1_000  # records that are encoded at once
_COMPARED = 100  # records whose stored examples are compared when they are used again

Encode = Callable[[Tokenizer, Sequence[Record]], list[Example]]


@dataclass(frozen=True)
class Lengths:
    """Lengths of the examples of a split; that of a pair is the length of its longer text."""

    total: int
    median: int
    percentile_95: int
    longest: int


@dataclass(frozen=True)
class Facts:
    """Facts about a checked corpus. Mappings by split have the keys train, dev and test."""

    task: TaskName
    # Number of records with text, without repeated ones that are dropped. `prepare` replaces it by
    # the number of encoded examples.
    examples: Mapping[str, int]
    dropped: Mapping[str, Mapping[str, int]]  # by split: reason ("empty", "repeated", "too long") and number
    repeated: Mapping[str, int]  # records that equal an earlier one of the split
    overlap: Mapping[str, int]  # records of dev and test whose texts train also has
    source_overlap: Mapping[str, int]  # pairs of dev and test of which train has only the source
    labels: Mapping[str, int]  # names in the order of their indices, and numbers in train
    labels_missing_in_dev: tuple[str, ...]
    num_contradictions: int  # texts that a later line, of any split, repeats with other labels
    has_dialogues: bool
    characters: Mapping[str, Lengths]  # of all records with text
    languages: tuple[str, str] | None = None
    split_seed: int | None = None
    contradictions: tuple[str, ...] = ()  # the first texts, each with the lines of its labels
    notes: tuple[str, ...] = ()  # about what is read and what is not
    pair_warnings: tuple[str, ...] = ()  # about pairs that are probably no translations
    score_limits: tuple[float, float] | None = None  # of similar texts in train; 0 and 1 if all are between them
    # Facts that `prepare` adds. Lengths are those of the examples that are not dropped.
    tokens: Mapping[str, Lengths] = field(default_factory=dict)
    max_length_tokens: int = 0
    truncated: Mapping[str, int] = field(default_factory=dict)  # or, of tagging, further parts of texts
    vocab_size: int = 0
    coverage: Mapping[str, float] = field(default_factory=dict)  # shares of tokens of dev, test that train has
    byte_share: Mapping[str, float] = field(default_factory=dict)  # shares of tokens that are bytes or unknown

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the labels that a model predicts."""
        return tags_of(tuple(self.labels)) if self.task == "tagging" else tuple(self.labels)


@dataclass(frozen=True, kw_only=True)
class Prepared(TrainingData):
    """Encoded corpus. Records of dev are at most 1,000, at equal distances."""

    facts: Facts


class _Scan:
    """Counts over the records of a split."""

    def __init__(self, split: Split, kinds: dict[str, str]) -> None:
        self.num_examples = 0
        self.left_out = Counter({"empty": 0})  # records by the reason
        self.notes, self.note_lines = Counter[str](), dict[str, int]()
        self.has_dialogues, self.num_unanswered, self.unread = False, 0, set[str]()
        self.texts, self.records = array("Q"), array("Q")  # hashes of texts, and of texts with labels
        self.sources = array("Q")  # hashes of the sources of pairs
        self.scores = (math.inf, -math.inf)  # the least and the greatest one
        self.labels = Counter[str]()
        self.label_lines: dict[str, int] = {}  # line of the first record of each label
        self.characters = Counter[int]()
        for number, record in split.numbered(kinds):
            if isinstance(record, str):
                self.left_out[record] += 1
                continue
            self.num_examples += 1
            self._count(record)
            if isinstance(record, TaggedRecord):
                self.notes.update(record.notes)
                self.note_lines = dict.fromkeys(record.notes, number) | self.note_lines
            if isinstance(record, LabelledRecord | TaggedRecord):
                for label in record.labels:
                    self.labels[label] += 1
                    self.label_lines.setdefault(label, number)
                check_number_of_labels(len(self.labels), split)
        if not self.num_examples:
            problem = (
                f"has only records that are left out ({', '.join(+self.left_out)})" if +self.left_out else "is empty"
            )
            raise CorpusError(f"{split} {problem}; {split.name} needs at least one example")

    def _count(self, record: Record) -> None:
        texts = texts_of(record)
        self.texts.append(hash_texts(texts))
        if isinstance(record, LabelledRecord):
            self.records.append(hash_texts((*texts, *sorted(record.labels))))
        if isinstance(record, PairRecord):
            self.sources.append(hash_texts([record.source]))
            if record.score is not None:
                self.scores = min(self.scores[0], record.score), max(self.scores[1], record.score)
        if isinstance(record, DialogueRecord):
            self.has_dialogues = True
            self.num_unanswered += record.messages[-1].role != "assistant"
            self.unread |= record.unread
        combine = max if isinstance(record, PairRecord) else sum
        self.characters[combine(map(len, texts))] += 1

    @property
    def num_repeated(self) -> int:
        hashes = self.records or self.texts
        return len(hashes) - len(distinct(hashes))


def is_in(hashes: "array[int]", values: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return for each hash whether it is one of ascending values, at least one."""
    wanted = np.frombuffer(hashes, np.uint64)
    nearest = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
    is_equal: NDArray[np.bool_] = values[nearest] == wanted
    return is_equal


def measure(counts: Mapping[int, int]) -> Lengths:
    """Return statistics of lengths, given the number of examples of each, at least one."""
    lengths, numbers = np.array(list(counts.items())).T
    # The smallest lengths that these shares of examples do not exceed.
    median, percentile_95 = np.percentile(lengths, (50, 95), weights=numbers, method="inverted_cdf").tolist()
    return Lengths(int(lengths @ numbers), median, percentile_95, int(lengths.max()))


def check_corpus(corpus: Corpus) -> Facts:
    """Read and check all records of a corpus.

    Repeated records are kept, as in fairseq, OpenNMT and the trainers of Hugging Face, except pairs
    of the task encoder: a pair that occurs twice in a batch would be its own negative example.

    Raises:
        CorpusError: a line is not a record, kinds of values are mixed, a split is empty, train and
            dev are identical, labels are missing in train, or there are fewer than two.
    """
    unusual_pairs = tuple(pair_warnings(corpus)) if corpus.reading.task == "translation" else ()
    kinds: dict[str, str] = {}
    scans = {split.name: _Scan(split, kinds) for split in corpus.splits}
    train, dev = scans["train"], scans["dev"]
    train_texts = distinct(train.texts)
    if corpus.split_seed is None and np.array_equal(train_texts, distinct(dev.texts)):
        raise CorpusError(
            f"{corpus.train} and {corpus.dev} have the same texts, so that dev could not show overfitting; use other "
            "texts for dev, or remove the file to keep a part of train for it"
        )
    if corpus.reading.task in ("classification", "tagging"):
        _check_labels(corpus, scans)
    if train.scores[0] == train.scores[1]:
        raise CorpusError(f"all scores of {corpus.train} are {train.scores[0]:g}; add texts with another score")
    is_deduplicated = corpus.reading.task == "encoder"
    examples = {name: scan.num_examples for name, scan in scans.items()}
    dropped = {name: dict(scan.left_out) for name, scan in scans.items()}
    if is_deduplicated:
        dropped["train"]["repeated"] = train.num_repeated
        examples["train"] -= train.num_repeated
    held_out = {name: scan for name, scan in scans.items() if name != "train"}
    has_texts = {name: is_in(scan.texts, train_texts) for name, scan in held_out.items()}
    train_sources = distinct(train.sources)
    num_contradictions, contradictions = _contradictions(corpus, scans)
    return Facts(
        corpus.reading.task,
        examples,
        dropped,
        repeated={name: scan.num_repeated for name, scan in scans.items()},
        overlap={name: int(has_text.sum()) for name, has_text in has_texts.items()},
        source_overlap={
            name: int((is_in(scan.sources, train_sources) & ~has_texts[name]).sum())
            for name, scan in held_out.items()
            if scan.sources
        },
        labels={label: train.labels[label] for label in sorted(train.labels, key=_label_order(train.labels))},
        labels_missing_in_dev=tuple(sorted(train.labels.keys() - dev.labels.keys())),
        num_contradictions=num_contradictions,
        has_dialogues=train.has_dialogues,
        characters={name: measure(scan.characters) for name, scan in scans.items()},
        languages=corpus.languages,
        split_seed=corpus.split_seed,
        pair_warnings=unusual_pairs,
        score_limits=limits_of(train.scores) if train.scores[0] <= train.scores[1] else None,
        contradictions=contradictions,
        notes=tuple(_notes(corpus, scans)),
    )


def _notes(corpus: Corpus, scans: Mapping[str, _Scan]) -> Iterator[str]:
    splits = () if scans["train"].has_dialogues else corpus.splits  # whose fields are counted for all records
    yield from dict.fromkeys(note for split in splits for note in describe_columns(split.files, corpus.reading))
    for split in corpus.splits:
        scan = scans[split.name]
        for note, number in scan.notes.items():
            where = split.line(scan.note_lines[note])
            yield f"note: entities of {split.name} that {note}: {number:,}, first in {where}"
    if number := sum(scan.num_unanswered for scan in scans.values()):
        yield f"note: dialogues whose last messages have no reply, which are left out: {number:,}"
    if unread := sorted(set[str]().union(*(scan.unread for scan in scans.values()))):
        yield f"note: fields that are not read: {_listed(unread)}"


def _contradictions(corpus: Corpus, scans: Mapping[str, _Scan]) -> tuple[int, tuple[str, ...]]:
    """Return the number of texts with different labels, and the lines of the first of them."""
    if not scans["train"].records:
        return 0, ()
    texts = np.concatenate([np.frombuffer(scan.texts, np.uint64) for scan in scans.values()])
    records = np.concatenate([np.frombuffer(scan.records, np.uint64) for scan in scans.values()])
    _, first = np.unique(records, return_index=True)  # one record for each set of labels of a text
    values, counts = np.unique(texts[first], return_counts=True)
    wanted = set(values[counts > 1].tolist())
    found: dict[str, dict[str, list[str]]] = {}  # lines of each label of a text
    for split in corpus.splits if wanted else ():
        for number, record in split.numbered():
            if not isinstance(record, LabelledRecord) or hash_texts(texts_of(record)) not in wanted:
                continue
            if record.text in found or len(found) < MAX_CONTRADICTIONS:
                lines = found.setdefault(record.text, {})
                of_label = lines.setdefault(" and ".join(sorted(record.labels)) or "no label", [])
                if len(of_label) <= MAX_LISTED_LINES:
                    of_label.append(split.line(number) if len(of_label) < MAX_LISTED_LINES else "…")
    return len(wanted), tuple(
        f"{' '.join(text.split())[:80]!r}: "
        + ", ".join(f"{label} ({'; '.join(of_label)})" for label, of_label in lines.items())
        for text, lines in found.items()
    )


def _check_labels(corpus: Corpus, scans: Mapping[str, _Scan]) -> None:
    known = scans["train"].labels
    if corpus.reading.task == "tagging":
        if not known:
            raise CorpusError(f"{corpus.train} has no entity; check that it has tags such as B-PER")
    elif len(known) < 2:
        present = f"only the label {next(iter(known))!r}" if known else "no label"
        raise CorpusError(f"{corpus.train} has {present}; classification needs at least two: add examples of another")
    unknown = {
        label: f"{label!r} ({split.line(number)})"
        for split in reversed(corpus.splits[1:])
        for label, number in scans[split.name].label_lines.items()
        if label not in known
    }
    if unknown:
        names = "label" if len(unknown) == 1 else f"{len(unknown)} labels"
        raise CorpusError(
            f"train has no example of the {names} {_listed([*unknown.values()])}; add examples, rename the labels as "
            "in train, or remove these lines"
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def _label_order(labels: Mapping[str, int]) -> Callable[[str], Any]:
    """Return a key that sorts integers by value, and other labels alphabetically."""
    return int if all(re.fullmatch(r"-?[0-9]{1,18}", label) for label in labels) else str


def prepare(
    run: Path,
    corpus: Corpus,
    facts: Facts,
    tokenizer: Tokenizer,
    encode: Encode,
    max_length_tokens: int,
) -> Prepared:
    """Encode a corpus and write the examples to the folder of a run.

    Examples of the same files, tokenizer and settings are used again. Only one process at a time
    may prepare a run.

    Args:
        encode: returns the examples of records in their order, one or more for each.
        max_length_tokens: length of the longest example. Longer texts of `TRUNCATED_TASKS` are
            truncated; longer examples of other tasks are dropped, unless all of a split are.

    Raises:
        CorpusError: all examples of a split are too long, or a file changed.
    """
    settings = {
        "version": _VERSION,
        "reading": dataclasses.asdict(corpus.reading),
        "files": {split.name: [path.name for path in split.files] for split in corpus.splits},
        "digests": dict(corpus.digests),
        "split_seed": corpus.split_seed,
        "labels": list(facts.labels),
        "tokenizer": hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
        "max_length_tokens": max_length_tokens,
    }
    first, sample = _read_dev(corpus.dev, facts.examples["dev"])
    folder = run / FOLDER
    encoder = _Encoder(corpus.reading.task, tokenizer, encode, max_length_tokens)
    result = _read_result(folder, settings, encoder.encode(corpus.dev, first, encoder.no_counts()))
    if result is None:
        with _replacing(folder) as temporary:
            result = _encode_corpus(temporary, corpus, facts, encoder)
            (temporary / _RESULT).write_text(json.dumps({"settings": settings, "result": result}), encoding="utf-8")
    digest = result.pop("digest")
    tokens = {name: Lengths(**values) for name, values in result.pop("tokens").items()}
    prepared_facts = replace(facts, tokens=tokens, max_length_tokens=max_length_tokens, **result)
    train, dev = DiskExamples(folder, "train"), DiskExamples(folder, "dev")
    return Prepared(tokenizer, train, dev, digest, sample, facts=prepared_facts)


def _read_dev(dev: Split, num_records: int) -> tuple[list[Record], list[Record]]:
    """Return the first records of dev, and a sample of all."""
    num_sampled = min(num_records, MAX_DEV_RECORDS)
    sampled = {index * num_records // num_sampled for index in range(num_sampled)}
    first, sample = list[Record](), list[Record]()
    for index, record in enumerate(dev):
        if index < _COMPARED:
            first.append(record)
        if index in sampled:
            sample.append(record)
    return first, sample


def _read_result(folder: Path, settings: Mapping[str, Any], first: Sequence[Example]) -> dict[str, Any] | None:
    """Return the stored result of `_encode_corpus`, or None if there is none with these settings
    and these first examples of dev.
    """
    try:
        stored = json.loads((folder / _RESULT).read_text(encoding="utf-8"))
        train, dev = DiskExamples(folder, "train"), DiskExamples(folder, "dev")
        num_examples = stored["result"]["examples"]
        is_complete = (len(train), len(dev)) == (num_examples["train"], num_examples["dev"])
        has_first = all(dev[index] == (list(ids), list(other)) for index, (ids, other) in enumerate(first))
    except (OSError, ValueError, LookupError, TypeError):
        return None
    result: dict[str, Any] = stored["result"]
    return result if stored.get("settings") == settings and is_complete and has_first else None


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder` on success and is removed on failure."""
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    try:
        temporary.mkdir(parents=True)
        yield temporary
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    except OSError as error:
        raise OSError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _encode_corpus(folder: Path, corpus: Corpus, facts: Facts, encoder: "_Encoder") -> dict[str, Any]:
    """Write the examples of train and dev; return facts about the examples of all splits. Dev and
    test come first, because train takes long.
    """
    encoded = {split.name: encoder.encode_split(folder, split, facts) for split in reversed(corpus.splits)}
    for path in folder.glob("test.*"):  # only train and dev are read
        path.unlink()
    names = [split.name for split in corpus.splits]
    train, dev = encoded["train"], encoded["dev"]
    uses = {name: counts.token_uses for name, counts in encoded.items()}
    is_byte = _is_byte(encoder.tokenizer, encoder.vocab_size)
    content = json.dumps([list(facts.labels), train.digest, dev.digest])
    return {
        "digest": hashlib.sha256(content.encode()).hexdigest(),
        "examples": {name: encoded[name].sizes.total() for name in names},
        "dropped": {name: {**facts.dropped[name], "too long": encoded[name].num_dropped} for name in names},
        "truncated": {name: encoded[name].num_truncated for name in names},
        "tokens": {name: dataclasses.asdict(measure(encoded[name].sizes)) for name in names},
        "vocab_size": encoder.vocab_size,
        "coverage": {name: float(uses[name][uses["train"] > 0].sum() / uses[name].sum()) for name in names[1:]},
        "byte_share": {name: float(uses[name][is_byte].sum() / uses[name].sum()) for name in names},
    }


@dataclass
class _Encoded:
    """Counts over the examples of a split."""

    token_uses: NDArray[np.int64]  # by token id
    sizes: Counter[int] = field(default_factory=Counter)  # numbers of examples by their number of tokens
    num_read: int = 0
    num_dropped: int = 0
    num_truncated: int = 0
    digest: str = ""


class _Encoder:
    """Encodes splits as streams, and checks the lengths of examples."""

    def __init__(self, task: TaskName, tokenizer: Tokenizer, encode: Encode, max_length_tokens: int) -> None:
        self.tokenizer, self._task, self._encode = tokenizer, task, encode
        self._limit = max_length_tokens
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        # Lists of an example that are tokens.
        self._sides = (0, 1) if task in PAIR_TASKS and task != "reranking" else (0,)

    def no_counts(self) -> _Encoded:
        return _Encoded(np.zeros(self.vocab_size, np.int64))

    def encode_split(self, folder: Path, split: Split, facts: Facts) -> _Encoded:
        last_id, last_label = self.vocab_size - 1, len(facts.labels) - 1
        last = {
            "classification": last_label,
            "language-model": 1,
            "tagging": len(facts.outputs),
            "reranking": SCORE_UNIT,
            "encoder": LAST_MARK,
        }
        result = self.no_counts()
        with ExampleWriter(folder, split.name, (last_id, last.get(self._task, last_id))) as writer:
            is_deduplicated = self._task == "encoder" and split.name == "train"
            records = _without_repeated(split) if is_deduplicated else iter(split)
            while chunk := list(islice(records, _CHUNK)):
                writer.add(self.encode(split, chunk, result))
                result.num_read += len(chunk)
        if result.num_read != facts.examples[split.name]:
            raise CorpusError(f"{split} changed while it was read; start again when it is complete")
        if not result.sizes:
            raise CorpusError(
                f"{split} has no example of at most {self._limit} tokens; shorten the texts, or increase "
                "--max-length-tokens"
            )
        result.digest = writer.digest()
        return result

    def encode(self, split: Split, records: Sequence[Record], result: _Encoded) -> list[Example]:
        """Return the examples of the next records of a split; those too long are cut or dropped."""
        try:
            examples = self._encode(self.tokenizer, records)
        except UsageError as error:
            raise self._located(split, records, result.num_read) or error from None
        sizes = self._sizes(examples)
        is_long = self._longest(examples) > self._limit
        if self._task in TRUNCATED_TASKS:
            examples = [self._truncate(one) if cut else one for one, cut in zip(examples, is_long, strict=True)]
            sizes = self._sizes(examples)
            result.num_truncated += int(is_long.sum())
        else:
            examples, sizes = list(compress(examples, ~is_long)), sizes[~is_long]
            result.num_dropped += int(is_long.sum())
            result.num_truncated += len(examples) - len(records) if self._task == "tagging" else 0
        result.sizes.update(sizes.tolist())
        for side in self._sides:
            ids = flatten(examples, side)
            result.token_uses += np.bincount(ids[ids < MARK], minlength=self.vocab_size)
        return examples

    def _truncate(self, example: Example) -> Example:
        if self._task == "encoder":
            return truncated(example, lambda ids: truncate(self.tokenizer, ids, self._limit))
        return truncate(self.tokenizer, example[0], self._limit), example[1]

    def _sizes(self, examples: Sequence[Example]) -> NDArray[np.int32]:
        """Return the number of tokens of each example; that of a pair is the larger one."""
        sizes: NDArray[np.int32] = lengths_of(examples)[:, self._sides].max(axis=1)
        return sizes

    def _located(self, split: Split, records: Sequence[Record], start: int) -> CorpusError | None:
        """Return the error of the first of some records of a split that cannot be encoded; `start`
        is the index of the first record in the split.
        """
        for index, record in enumerate(records, start):
            try:
                self._encode(self.tokenizer, [record])
            except UsageError as error:
                return CorpusError(f"{split.location(index)}: {error}")
        return None

    def _longest(self, examples: Sequence[Example]) -> NDArray[np.int32]:
        """Return the length of the longest text of each example."""
        sizes = self._sizes(examples)
        if self._task == "encoder":  # the second list can have several texts
            for index in np.flatnonzero(sizes > self._limit).tolist():
                sizes[index] = longest_text(examples[index])
        return sizes


def _without_repeated(split: Split) -> Iterator[Record]:
    hashes = array("Q", (hash_texts(texts_of(record)) for record in split))
    _, first = np.unique(np.frombuffer(hashes, np.uint64), return_index=True)
    is_first = np.zeros(len(hashes), bool)
    is_first[first] = True
    return compress(split, is_first)


def _is_byte(tokenizer: Tokenizer, vocab_size: int) -> NDArray[np.bool_]:
    """Return True for each token that is one byte of a longer character, or the unknown token."""
    description = json.loads(tokenizer.to_str())
    unknown = {description["model"].get("unk_token"), description["model"].get("unk_id")}
    is_byte_level = "'ByteLevel'" in str([description["pre_tokenizer"], description["decoder"]])
    beyond_ascii = {character for character, byte in byte_alphabet().items() if byte >= 0x80}
    is_byte = np.zeros(vocab_size, bool)
    for token, index in tokenizer.get_vocab().items():
        is_byte[index] = (
            token in unknown
            or index in unknown
            or re.fullmatch("<0x[0-9A-F]{2}>", token) is not None
            or (is_byte_level and token in beyond_ascii)
        )
    return is_byte


def summary(facts: Facts, *, is_trained: bool = False) -> list[str]:
    """Return lines that describe a corpus, with one line for each warning. A model that was trained
    before knows other tokens than those of the corpus.
    """
    numbers = ", ".join(f"{name} {number:,}" for name, number in facts.examples.items())
    lines = [f"examples: {numbers}"]
    if facts.split_seed is not None:
        lines.append(f"dev: a part of the file of train, chosen with the seed {facts.split_seed}")
    if facts.languages is not None:
        lines.append(f"languages: {facts.languages[0]} (source) to {facts.languages[1]} (target)")
    lines += facts.notes
    dropped = _join(
        f"{number:,} {reason} in {name}"
        for name, reasons in facts.dropped.items()
        for reason, number in reasons.items()
        if number
    )
    lines.append(f"dropped: {dropped}")
    if any(facts.truncated.values()):
        action = "further parts of texts divided" if facts.task == "tagging" else "truncated"
        lines.append(f"{action} to {facts.max_length_tokens:,} tokens: {_by_split(facts.truncated)}")
    kept = {name: number for name, number in facts.repeated.items() if "repeated" not in facts.dropped[name]}
    lines.append(f"repeated, kept: {_by_split(kept)}")
    if facts.labels:
        total = facts.examples["train"] + facts.dropped["train"].get("too long", 0)
        shares = [f"{label} {number / total:.1%}" for label, number in facts.labels.items()]
        if facts.task == "tagging":
            shares = [f"{label} {number:,}" for label, number in facts.labels.items()]
        lines.append(f"labels: {len(shares)}: {_listed(shares)}")
    lines += [
        f"tokens of an example of {name}: median {lengths.median:,}, 95 % have at most {lengths.percentile_95:,}, "
        f"longest {lengths.longest:,}"
        for name, lengths in facts.tokens.items()
    ]
    lines += [
        f"vocabulary: train has {share:.1%} of the tokens of {name}; {facts.byte_share[name]:.1%} are single bytes or "
        "unknown"
        for name, share in facts.coverage.items()
    ]
    lines += [
        f"note: train also has the sources of {number:,} more of {facts.examples[name]:,} examples of {name}, with "
        f"other targets; remove them from train if {name} should show how the model treats new sources"
        for name, number in facts.source_overlap.items()
        if number
    ]
    if facts.task == "translation" and facts.languages is None:
        lines.append(
            "note: the languages are not known, so that the exported model does not state them; give tags as names of "
            "languages, and of columns that have other names, such as --source en --target de"
        )
    return lines + [f"warning: {text}" for text in _warnings(facts, is_trained)]


def _by_split(numbers: Mapping[str, int]) -> str:
    return _join(f"{number:,} in {name}" for name, number in numbers.items() if number)


def _join(parts: Iterable[str]) -> str:
    return ", ".join(parts) or "none"


def _warnings(facts: Facts, is_trained: bool) -> Iterator[str]:
    yield from facts.pair_warnings
    for name, number in facts.overlap.items():
        if number:
            yield (
                f"train also has the texts of {number:,} of {facts.examples[name]:,} examples of {name}, which makes "
                f"results on {name} too good; remove them from train"
            )
    if facts.examples["dev"] < MIN_DEV_EXAMPLES:
        yield f"fewer than {MIN_DEV_EXAMPLES} examples in dev, whose loss decides when the training ends; add some"
    if facts.num_contradictions:
        listed = "".join(f"\n  {line}" for line in facts.contradictions[:MAX_LISTED_TEXTS])
        more = facts.num_contradictions > MAX_LISTED_TEXTS
        yield (
            f"texts with different labels: {facts.num_contradictions:,}; correct them"
            f"{f', the first {len(facts.contradictions):,} are in {CONTRADICTIONS} of the run' if more else ''}{listed}"
        )
    for names in _similar(facts.labels):
        yield f"labels that differ only in case or spaces: {names}; use one name for them"
    rare = [f"{label} {number}" for label, number in facts.labels.items() if number < MIN_LABEL_EXAMPLES]
    if rare:
        yield f"fewer than {MIN_LABEL_EXAMPLES} examples in train: {_listed(rare)}; add some"
    if facts.labels_missing_in_dev:
        yield f"dev has no example of {_listed(facts.labels_missing_in_dev)}; results do not show them, so add some"
    num_dropped = facts.dropped["train"].get("too long", 0)
    num_truncated = facts.truncated.get("train", 0) if facts.task in TRUNCATED_TASKS else 0
    num_long, num_all = num_dropped or num_truncated, facts.examples["train"] + num_dropped
    if num_long > MAX_DROPPED * num_all:
        yield (
            f"{num_long:,} of {num_all:,} examples of train are {'dropped' if num_dropped else 'truncated'}, because "
            f"they have more than {facts.max_length_tokens:,} tokens; increase --max-length-tokens, or shorten them"
        )
    for name, share in facts.coverage.items():
        if share < MIN_COVERAGE and not is_trained:
            yield f"train has only {share:.1%} of the tokens of {name}; add examples like those of {name}"


def _similar(labels: Iterable[str]) -> Iterator[str]:
    """Yield the names of labels that differ only in case, spaces or forms of characters."""
    by_key: dict[str, list[str]] = {}
    for label in labels:
        by_key.setdefault("".join(unicodedata.normalize("NFKC", label).casefold().split()), []).append(label)
    return (" and ".join(map(repr, names)) for names in by_key.values() if len(names) > 1)


def check_writable(run: Path) -> None:
    """Check that the folder of a run can be created or written."""
    folder = _existing(run)
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; choose a folder for the run")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"no write access to {folder} ({error.strerror}); change its permissions, or choose another folder for the "
            "run"
        ) from None


def check_space(run: Path, bytes_needed: int) -> None:
    """Check that the disk has space for the checkpoints that a run adds."""
    folder = _existing(run)
    free = shutil.disk_usage(folder).free
    if free < bytes_needed:
        raise UsageError(
            f"the disk of {folder} has {free / 2**20:,.0f} MiB free, but new checkpoints need "
            f"{bytes_needed / 2**20:,.0f} MiB; remove files, or choose another folder for the run"
        )


def _existing(path: Path) -> Path:
    """Return the path or its closest parent that exists."""
    return next(candidate for candidate in (path, *path.absolute().parents) if candidate.exists())
