"""Facts about a corpus, from a check of all its records before the training; errors and warnings.

`check_corpus` reads streams and needs no tokenizer. In memory are 8 bytes for each record (16 for a
labelled text and for a pair), with copies while they are sorted up to 60, and tables whose sizes do
not depend on the number of records.
"""

import math
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sightline.base.errors import list_of
from sightline.model.data.corpus import Corpus, Split, check_number_of_labels, distinct, hash_texts
from sightline.model.data.files import CorpusError
from sightline.model.data.formats import Findings
from sightline.model.data.pair_checks import pair_warnings
from sightline.model.data.records import (
    DialogueRecord,
    LabelledRecord,
    PairRecord,
    Record,
    TaggedRecord,
    TaskName,
    texts_of,
)
from sightline.model.data.similar_texts import limits_of
from sightline.model.data.tags import tags_of

CONTRADICTIONS = "contradictions.txt"  # texts with different labels, in the folder of a run
MIN_COVERAGE = 0.98  # share of the tokens of dev below which a warning is due
MIN_LABEL_EXAMPLES = 5
MIN_DEV_EXAMPLES = 10
MAX_LONG = 0.05  # share of train above which a warning is due
MAX_LISTED = 20  # labels in a line
MAX_LISTED_TEXTS = 10  # texts with different labels in the summary
MAX_LISTED_LINES = 5  # of a text and a label
MAX_CONTRADICTIONS = 1_000  # texts with different labels that are kept


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
    # Facts that `sightline.model.data.preparation.prepare` adds. Lengths are those of the examples
    # that are not dropped.
    tokens: Mapping[str, Lengths] = field(default_factory=dict)
    max_length_tokens: int = 0
    truncated: Mapping[str, int] = field(default_factory=dict)
    coverage: Mapping[str, float] = field(default_factory=dict)  # shares of tokens of dev, test that train has

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the labels that a model predicts."""
        return tags_of(tuple(self.labels)) if self.task == "tagging" else tuple(self.labels)


class _Scan:
    """Counts over the records of a split."""

    def __init__(self, split: Split, findings: Findings) -> None:
        self.left_out = Counter({"empty": 0})  # records by the reason
        self.notes, self.labels = Counter[str](), Counter[str]()
        self.first_lines: dict[str, int] = {}  # of each note and label
        self.unread, self.has_dialogues = set[str](), False
        self.texts, self.records = array("Q"), array("Q")  # hashes of texts, and of texts with labels
        self.sources = array("Q")  # hashes of the sources of pairs
        self.scores = (math.inf, -math.inf)  # the least and the greatest one
        self.characters = Counter[int]()
        for number, record in split.numbered(findings):
            if isinstance(record, str):
                self.left_out[record] += 1
                continue
            texts = texts_of(record)
            self.texts.append(hash_texts(texts))
            self.characters[max(map(len, texts)) if isinstance(record, PairRecord) else sum(map(len, texts))] += 1
            self._count(record, number)
            check_number_of_labels(len(self.labels), split)
        self.num_examples = len(self.texts)
        if not self.num_examples:
            reasons = ", ".join(+self.left_out)
            problem = f"has only records that are left out ({reasons})" if reasons else "is empty"
            raise CorpusError(f"{split} {problem}; {split.name} needs at least one example")
        hashes = self.records or self.texts
        self.num_repeated = len(hashes) - len(distinct(hashes))

    def _count(self, record: Record, number: int) -> None:
        """Count what only records of some tasks have."""
        notes: tuple[str, ...] = ()
        if isinstance(record, LabelledRecord):
            self.records.append(hash_texts((record.text, *sorted(record.labels))))
        elif isinstance(record, TaggedRecord):
            notes = tuple(f"entities that {note}" for note in record.notes)
        elif isinstance(record, PairRecord):
            self.sources.append(hash_texts([record.source]))
            if record.score is not None:
                self.scores = min(self.scores[0], record.score), max(self.scores[1], record.score)
        elif isinstance(record, DialogueRecord):
            self.has_dialogues = True
            self.unread |= record.unread
            if record.messages[-1].role != "assistant":
                notes = ("dialogues whose last messages have no reply, which are left out",)
        labels = record.labels if isinstance(record, LabelledRecord | TaggedRecord) else ()
        self.notes.update(notes)
        self.labels.update(labels)
        for name in (*notes, *labels):
            self.first_lines.setdefault(name, number)


def is_in(hashes: "array[int]", values: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return for each hash whether it is one of ascending values, at least one; `numpy.isin` takes
    several times the memory.
    """
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
    task, findings = corpus.reading.task, Findings()
    unusual_pairs = tuple(pair_warnings(corpus)) if task == "translation" else ()
    scans = {split.name: _Scan(split, findings) for split in corpus.splits}
    train, dev = scans["train"], scans["dev"]
    train_texts, train_sources = distinct(train.texts), distinct(train.sources)
    if corpus.split_seed is None and np.array_equal(train_texts, distinct(dev.texts)):
        raise CorpusError(
            f"{corpus.train} and {corpus.dev} have the same texts, so that dev could not show overfitting; use other "
            "texts for dev, or remove the file to keep a part of train for it"
        )
    if task in ("classification", "tagging"):
        _check_labels(corpus, scans)
    if train.scores[0] == train.scores[1]:
        raise CorpusError(f"all scores of {corpus.train} are {train.scores[0]:g}; add texts with another score")
    examples = {name: scan.num_examples for name, scan in scans.items()}
    dropped = {name: dict(scan.left_out) for name, scan in scans.items()}
    if task == "encoder":
        dropped["train"]["repeated"] = train.num_repeated
        examples["train"] -= train.num_repeated
    overlap, source_overlap = dict[str, int](), dict[str, int]()
    for name, scan in scans.items():
        if name != "train":
            has_text = is_in(scan.texts, train_texts)
            overlap[name] = int(has_text.sum())
            if scan.sources:
                source_overlap[name] = int((is_in(scan.sources, train_sources) & ~has_text).sum())
    num_contradictions, contradictions = _contradictions(corpus, scans)
    return Facts(
        task,
        examples,
        dropped,
        repeated={name: scan.num_repeated for name, scan in scans.items()},
        overlap=overlap,
        source_overlap=source_overlap,
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
        notes=(*findings.notes, *_notes(corpus, scans)),
    )


def _notes(corpus: Corpus, scans: Mapping[str, _Scan]) -> Iterator[str]:
    for split in corpus.splits:
        scan = scans[split.name]
        for note, number in scan.notes.items():
            yield f"note: {note}: {number:,} in {split.name}, first in {split.line(scan.first_lines[note])}"
    if unread := sorted(set[str]().union(*(scan.unread for scan in scans.values()))):
        yield f"note: fields that are not read: {list_of(unread, MAX_LISTED)}"


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
                label = " and ".join(sorted(record.labels)) or "no label"
                found.setdefault(record.text, {}).setdefault(label, []).append(split.line(number))
    return len(wanted), tuple(
        f"{' '.join(text.split())[:80]!r}: "
        + ", ".join(f"{label} ({list_of(lines, MAX_LISTED_LINES, '; ')})" for label, lines in labels.items())
        for text, labels in found.items()
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
        label: f"{label!r} ({split.line(scans[split.name].first_lines[label])})"
        for split in reversed(corpus.splits[1:])
        for label in scans[split.name].labels
        if label not in known
    }
    if unknown:
        names = "label" if len(unknown) == 1 else f"{len(unknown)} labels"
        raise CorpusError(
            f"train has no example of the {names} {list_of(unknown.values(), MAX_LISTED)}; add examples, rename the "
            "labels as in train, or remove these lines"
        )


def _label_order(labels: Mapping[str, int]) -> Callable[[str], Any]:
    """Return a key that sorts integers by value, and other labels alphabetically."""
    return int if all(re.fullmatch(r"-?[0-9]{1,18}", label) for label in labels) else str


def summary(facts: Facts, *, is_trained: bool = False) -> list[str]:
    """Return lines that describe a corpus, with one line for each warning. A model that was trained
    before knows other tokens than those of the corpus.
    """
    lines = [f"examples: {', '.join(f'{name} {number:,}' for name, number in facts.examples.items())}"]
    if facts.split_seed is not None:
        lines.append(f"dev: a part of the file of train, chosen with the seed {facts.split_seed}")
    if facts.languages is not None:
        lines.append(f"languages: {facts.languages[0]} (source) to {facts.languages[1]} (target)")
    lines += facts.notes
    dropped = ", ".join(
        f"{number:,} {reason} in {name}"
        for name, reasons in facts.dropped.items()
        for reason, number in reasons.items()
        if number
    )
    lines.append(f"dropped: {dropped or 'none'}")
    if any(facts.truncated.values()):
        lines.append(f"truncated to {facts.max_length_tokens:,} tokens: {_by_split(facts.truncated)}")
    kept = {name: number for name, number in facts.repeated.items() if "repeated" not in facts.dropped[name]}
    lines.append(f"repeated, kept: {_by_split(kept)}")
    if facts.labels:
        total = facts.examples["train"] + facts.dropped["train"].get("too long", 0)
        shares = [f"{label} {number / total:.1%}" for label, number in facts.labels.items()]
        if facts.task == "tagging":
            shares = [f"{label} {number:,}" for label, number in facts.labels.items()]
        lines.append(f"labels: {len(shares)}: {list_of(shares, MAX_LISTED)}")
    lines += [
        f"tokens of an example of {name}: median {lengths.median:,}, 95 % have at most {lengths.percentile_95:,}, "
        f"longest {lengths.longest:,}"
        for name, lengths in facts.tokens.items()
    ]
    lines += [f"vocabulary: train has {share:.1%} of the tokens of {name}" for name, share in facts.coverage.items()]
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
    return ", ".join(f"{number:,} in {name}" for name, number in numbers.items() if number) or "none"


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
        yield f"fewer than {MIN_LABEL_EXAMPLES} examples in train: {list_of(rare, MAX_LISTED)}; add some"
    if facts.labels_missing_in_dev:
        missing = list_of(facts.labels_missing_in_dev, MAX_LISTED)
        yield f"dev has no example of {missing}; results do not show them, so add some"
    num_dropped, num_truncated = facts.dropped["train"].get("too long", 0), facts.truncated.get("train", 0)
    num_all = facts.examples["train"] + num_dropped
    if num_dropped + num_truncated > MAX_LONG * num_all:
        yield (
            f"{num_dropped + num_truncated:,} of {num_all:,} examples of train are "
            f"{'dropped' if num_dropped else 'truncated'}, because they have more than {facts.max_length_tokens:,} "
            "tokens; increase --max-length-tokens, or shorten them"
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
