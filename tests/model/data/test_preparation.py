import dataclasses
import json
import random
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sightline.base.errors import EXIT_USAGE, UsageError, exit_status
from sightline.base.text.tokenizer import read_tokenizer as read_served
from sightline.model.data.corpus import Corpus, open_corpus
from sightline.model.data.encoding import encode as encode_records
from sightline.model.data.examples import Example, Examples, MemoryExamples
from sightline.model.data.facts import Facts, Lengths, check_corpus, measure, summary
from sightline.model.data.files import CorpusError
from sightline.model.data.formats import Reading
from sightline.model.data.preparation import Encode, Prepared, prepare
from sightline.model.data.records import PairRecord, Record, TaskName, TextRecord
from sightline.model.data.tokenizer_training import encode_lines, train_tokenizer
from sightline.model.training.folder import locked

PAIRS = [(f"{animal} {number}", f"{number} {animal}!") for animal in ("Hund", "Katze", "Maus") for number in range(20)]


def write_rows(folder: Path, fields: tuple[str, str], splits: Mapping[str, Sequence[tuple[str, object]]]) -> None:
    folder.mkdir(exist_ok=True)
    for split, rows in splits.items():
        lines = (json.dumps(dict(zip(fields, row, strict=True))) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def write_pairs(folder: Path, splits: Mapping[str, Sequence[tuple[str, str]]]) -> Corpus:
    write_rows(folder, ("source", "target"), splits)
    return open_corpus(
        folder, Reading("translation", "de", "en") if (folder / "train.de").exists() else Reading("translation")
    )


def write_labelled(
    folder: Path, splits: Mapping[str, Sequence[tuple[str, object]]], *, multi_label: bool = False
) -> Corpus:
    write_rows(folder, ("text", "label"), splits)
    return open_corpus(folder, Reading("classification", multi_label=multi_label))


def write_texts(folder: Path, splits: Mapping[str, Sequence[str]]) -> Corpus:
    folder.mkdir(exist_ok=True)
    for split, texts in splits.items():
        (folder / f"{split}.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return open_corpus(folder, Reading("language-model"))


def all_of(examples: Examples) -> list[Example]:
    return [examples[index] for index in range(len(examples))]


def error_of(corpus: Corpus) -> str:
    with pytest.raises(CorpusError) as caught:
        check_corpus(corpus)
    assert exit_status(caught.value) == EXIT_USAGE
    return str(caught.value)


def encode_windows(tokenizer: Tokenizer, records: Sequence[Record]) -> list[Example]:
    """Encode texts as windows of at most two tokens."""
    ids = encode_lines(tokenizer, [record.text for record in records if isinstance(record, TextRecord)])
    windows = [one[start : start + 2] for one in ids for start in range(0, len(one), 2)]
    return [(window, [1] * len(window)) for window in windows]


@pytest.fixture(scope="module")
def toy() -> Tokenizer:
    return train_tokenizer([text for pair in PAIRS for text in pair], vocab_size=300)


def run_prepare(
    run: Path, corpus: Corpus, tokenizer: Tokenizer, encode: Encode = encode_records, max_length_tokens: int = 100
) -> Prepared:
    return prepare(run, corpus, check_corpus(corpus), tokenizer, encode, max_length_tokens)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=200))
def test_statistics_equal_those_of_a_sorted_list(lengths: list[int]) -> None:
    ordered = sorted(lengths)
    median, high = (ordered[-(-len(ordered) * share // 100) - 1] for share in (50, 95))
    assert measure(Counter(lengths)) == Lengths(sum(lengths), median, high, ordered[-1])


def test_facts_of_pairs(tmp_path: Path) -> None:
    train = [("a b", "c"), ("a b", "c"), ("d", "e f g"), (" ", "x"), ("h", "i")]
    corpus = write_pairs(tmp_path, {"train": train, "dev": [("d", "e f g"), ("d", "other")], "test": [("h", "i")] * 2})
    facts = check_corpus(corpus)
    assert facts.examples == {"train": 4, "dev": 2, "test": 2}
    assert facts.dropped == {"train": {"empty": 1}, "dev": {"empty": 0}, "test": {"empty": 0}}
    assert facts.repeated == {"train": 1, "dev": 0, "test": 1}
    assert facts.overlap == {"dev": 1, "test": 2}
    assert facts.source_overlap == {"dev": 1, "test": 0}
    assert facts.labels == {} and facts.labels_missing_in_dev == () and facts.num_contradictions == 0
    assert facts.characters["dev"] == Lengths(total=10, median=5, percentile_95=5, longest=5)
    assert not facts.has_dialogues


def test_facts_of_labelled_texts(tmp_path: Path) -> None:
    rows: list[tuple[str, object]] = [("one", 10), ("two", 9), ("two", 10), ("two", 10), ("three", -2), ("four", 10)]
    corpus = write_labelled(tmp_path, {"train": rows, "dev": [("one", 9), ("five", 10)]})
    facts = check_corpus(corpus)
    assert list(facts.labels.items()) == [("-2", 1), ("9", 1), ("10", 4)]
    assert facts.labels_missing_in_dev == ("-2",)
    assert facts.num_contradictions == 2
    assert facts.contradictions == (
        "'one': 10 (train.jsonl, line 1), 9 (dev.jsonl, line 1)",
        "'two': 9 (train.jsonl, line 2), 10 (train.jsonl, line 3; train.jsonl, line 4)",
    )
    assert facts.repeated == {"train": 1, "dev": 0}
    assert facts.overlap == {"dev": 1}  # the text counts, not the label
    assert facts.source_overlap == {}


def test_labels_that_differ_only_in_case_or_spaces_are_named(tmp_path: Path) -> None:
    labels = ["Refund", "refund", "other", "re fund", "Ｏther", "x"]
    corpus = write_labelled(tmp_path, {"train": [*zip("abcdef", labels, strict=True)], "dev": [("g", "x")]})
    lines = [line for line in summary(check_corpus(corpus)) if "differ only" in line]
    assert [line.removeprefix("warning: labels that differ only in case or spaces: ") for line in lines] == [
        "'Refund' and 're fund' and 'refund'; use one name for them",
        "'other' and 'Ｏther'; use one name for them",
    ]


def test_labels_are_in_alphabetical_order_if_one_is_no_integer(tmp_path: Path) -> None:
    rows = [("a", "10"), ("b", "9"), ("c", "x"), ("d", "²")]
    facts = check_corpus(write_labelled(tmp_path, {"train": rows, "dev": [("e", "x")]}))
    assert list(facts.labels) == ["10", "9", "x", "²"]


def test_facts_of_several_labels(tmp_path: Path) -> None:
    rows: list[tuple[str, object]] = [("one", ["x", "y"]), ("one", ["y", "x"]), ("two", []), ("three", ["y"])]
    corpus = write_labelled(tmp_path, {"train": rows, "dev": [("four", ["x"]), ("five", [])]}, multi_label=True)
    facts = check_corpus(corpus)
    assert facts.labels == {"x": 2, "y": 3}
    assert facts.repeated["train"] == 1 and facts.num_contradictions == 0
    assert "labels: 2: x 50.0%, y 75.0%" in summary(facts)


def test_facts_of_dialogues(tmp_path: Path) -> None:
    def dialogue(text: str) -> str:
        roles = ("user", "assistant")
        return json.dumps({"messages": [{"role": role, "content": text} for role in roles]}) + "\n"

    (tmp_path / "all.jsonl").write_text("".join(dialogue(f"a {index}") for index in range(30)), encoding="utf-8")
    facts = check_corpus(open_corpus(tmp_path / "all.jsonl", Reading("language-model")))
    assert facts.has_dialogues
    assert facts.examples == {"train": 28, "dev": 2}
    assert "dev: a part of the file of train, chosen with the seed 1" in summary(facts)


@pytest.mark.parametrize("split", ["train", "dev", "test"])
@pytest.mark.parametrize(
    ("texts", "problem"), [([], "is empty"), ([" ", ""], "has only records that are left out (empty)")]
)
def test_an_empty_split_is_an_error(tmp_path: Path, split: str, texts: list[str], problem: str) -> None:
    corpus = write_texts(tmp_path, {"train": ["a"], "dev": ["b"], "test": ["c"], split: texts})
    assert error_of(corpus) == f"{split}.txt {problem}; {split} needs at least one example"


def test_identical_train_and_dev_are_an_error(tmp_path: Path) -> None:
    corpus = write_texts(tmp_path, {"train": ["a", "b", "b"], "dev": ["b", "", "a"]})
    assert error_of(corpus) == (
        "train.txt and dev.txt have the same texts, so that dev could not show overfitting; use other texts for dev, "
        "or remove the file to keep a part of train for it"
    )


def test_a_label_that_train_never_shows_is_an_error(tmp_path: Path) -> None:
    rows = [("a", "x"), ("b", "y")]
    corpus = write_labelled(tmp_path, {"train": rows, "dev": rows[:1], "test": [("c", "x"), ("d", "z")]})
    ways_out = "add examples, rename the labels as in train, or remove these lines"
    assert error_of(corpus) == f"train has no example of the label 'z' (test.jsonl, line 2); {ways_out}"
    corpus = write_labelled(tmp_path, {"train": rows, "dev": [*rows[:1], ("e", "Y")], "test": [("c", "z"), ("d", "Y")]})
    assert error_of(corpus) == (
        "train has no example of the 2 labels 'z' (test.jsonl, line 1), 'Y' (dev.jsonl, line 2); " + ways_out
    )


@pytest.mark.parametrize(
    ("labels", "multi_label", "found"),
    [
        (["x", "x"], False, "only the label 'x'"),
        ([["x"], []], True, "only the label 'x'"),
        ([[], []], True, "no label"),
    ],
)
def test_fewer_than_two_labels_are_an_error(
    tmp_path: Path, labels: list[object], multi_label: bool, found: str
) -> None:
    rows = list(zip("ab", labels, strict=True))
    corpus = write_labelled(tmp_path, {"train": rows, "dev": rows[:1]}, multi_label=multi_label)
    assert error_of(corpus) == (f"train.jsonl has {found}; classification needs at least two: add examples of another")


def test_types_of_labels_are_compared_between_splits(tmp_path: Path) -> None:
    corpus = write_labelled(tmp_path, {"train": [("a", "1"), ("b", "0")], "dev": [("c", 1)]})
    assert error_of(corpus) == (
        f"records differ: {tmp_path}/train.jsonl, line 1 has a string as label, but {tmp_path}/dev.jsonl, line 1 "
        "has an integer as label; use only one of them"
    )


def test_prepared_examples_equal_examples_in_memory(tmp_path: Path, toy: Tokenizer) -> None:
    corpus = write_pairs(tmp_path / "data", {"train": PAIRS[:40] + PAIRS[:1], "dev": PAIRS[40:50], "test": PAIRS[50:]})
    prepared = run_prepare(tmp_path / "run", corpus, toy)
    for split, examples in ((corpus.train, prepared.train), (corpus.dev, prepared.dev)):
        in_memory = MemoryExamples(encode_records(toy, list(split)))
        assert all_of(examples) == all_of(in_memory)
        np.testing.assert_array_equal(examples.lengths, in_memory.lengths)
    assert list(prepared.dev_records) == list(corpus.dev)
    assert prepared.facts.labels == {}
    assert prepared.facts.examples == {"train": 41, "dev": 10, "test": 10}
    assert prepared.facts.tokens["test"].longest == max(
        map(len, (ids for one in encode_records(toy, list(corpus.test or ())) for ids in one))
    )
    files = {path.name for path in (tmp_path / "run" / "data").iterdir()}
    assert files == {f"{split}.{part}" for split in ("train", "dev") for part in ("values", "lengths")}
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["data"]


def test_prepared_labels_are_indices(tmp_path: Path, toy: Tokenizer) -> None:
    rows: list[tuple[str, object]] = [("Hund", ["x", "y"]), ("Katze", []), ("Maus", ["y"])]
    corpus = write_labelled(tmp_path / "data", {"train": rows, "dev": [("Hunde", ["x"])]}, multi_label=True)
    prepared = run_prepare(tmp_path / "run", corpus, toy, partial(encode_records, labels=["x", "y"]))
    assert list(prepared.facts.labels) == ["x", "y"]
    assert [prepared.train[index][1] for index in range(3)] == [[0, 1], [], [1]]


def test_a_text_may_give_several_examples(tmp_path: Path, toy: Tokenizer) -> None:
    texts = [source for source, _ in PAIRS]
    corpus = write_texts(tmp_path / "data", {"train": texts[:40], "dev": texts[40:]})
    prepared = run_prepare(tmp_path / "run", corpus, toy, encode_windows, max_length_tokens=2)
    expected = encode_windows(toy, list(corpus.train))
    assert len(expected) > 40
    assert all_of(prepared.train) == expected
    assert prepared.facts.examples == {"train": len(expected), "dev": len(prepared.dev)}
    assert len(prepared.dev_records) == 20


def test_the_digest_depends_on_examples_and_labels_only(tmp_path: Path, toy: Tokenizer) -> None:
    corpus = write_pairs(tmp_path / "data", {"train": PAIRS[:40], "dev": PAIRS[40:]})
    digest = run_prepare(tmp_path / "run", corpus, toy).digest
    assert run_prepare(tmp_path / "other", corpus, toy, max_length_tokens=99).digest == digest
    longer = write_pairs(tmp_path / "longer", {"train": PAIRS[:41], "dev": PAIRS[41:]})
    assert run_prepare(tmp_path / "other", longer, toy).digest != digest
    moved = write_pairs(tmp_path / "moved", {"train": PAIRS[39::-1], "dev": PAIRS[40:]})
    assert run_prepare(tmp_path / "other", moved, toy).digest != digest


def test_another_start_writes_the_examples_again(tmp_path: Path, toy: Tokenizer) -> None:
    corpus = write_pairs(tmp_path / "data", {"train": PAIRS[:40], "dev": PAIRS[40:]})
    first = run_prepare(tmp_path / "run", corpus, toy)
    (tmp_path / "run" / "data" / "train.values").write_bytes(b"damaged")
    (tmp_path / "run" / "data" / "test.values").write_bytes(b"of a process that was killed")
    second = run_prepare(tmp_path / "run", corpus, toy)
    assert (second.digest, second.facts) == (first.digest, first.facts)
    assert all_of(second.train) == encode_records(toy, list(corpus.train))
    assert len(list((tmp_path / "run" / "data").iterdir())) == 4


@pytest.mark.parametrize("task", ["translation", "encoder"])
def test_an_error_of_the_encoding_has_the_line_of_its_record(tmp_path: Path, toy: Tokenizer, task: TaskName) -> None:
    def encode(tokenizer: Tokenizer, records: Sequence[Record]) -> list[Example]:
        if PairRecord(*PAIRS[7]) in records:
            raise UsageError("it is wrong")
        return encode_records(tokenizer, records)

    write_pairs(tmp_path / "data", {"train": [*PAIRS[:5], *PAIRS[:40]], "dev": PAIRS[40:]})
    with pytest.raises(CorpusError, match=r"^train\.jsonl, line 13: it is wrong$"):
        run_prepare(tmp_path / "run", open_corpus(tmp_path / "data", Reading(task)), toy, encode)
    assert not (tmp_path / "run" / "data").exists()


LONG = ("Hund " * 50, "1")


def test_long_examples_of_train_are_dropped(tmp_path: Path, toy: Tokenizer) -> None:
    corpus = write_pairs(tmp_path / "data", {"train": [*PAIRS[:5], LONG, *PAIRS[5:40], LONG[::-1]], "dev": PAIRS[40:]})
    prepared = run_prepare(tmp_path / "run", corpus, toy, max_length_tokens=20)
    assert all_of(prepared.train) == encode_records(toy, [PairRecord(*pair) for pair in PAIRS[:40]])
    assert prepared.facts.dropped["train"] == {"empty": 0, "too long": 2}
    assert prepared.facts.examples["train"] == 40
    assert "dropped: 2 too long in train" in summary(prepared.facts)
    assert prepared.facts.max_length_tokens == 20


def test_long_dialogues_are_dropped_in_all_splits(tmp_path: Path, toy: Tokenizer) -> None:
    def encode(_: Tokenizer, records: Sequence[Record]) -> list[Example]:
        lengths = [int(record.text) for record in records if isinstance(record, TextRecord)]
        return [([1] * length, [1] * length) for length in lengths]

    corpus = write_texts(tmp_path / "data", {"train": ["5", "21", "6"], "dev": ["7", "22", "23"]})
    prepared = run_prepare(tmp_path / "run", corpus, toy, encode, max_length_tokens=20)
    assert [len(prepared.train), len(prepared.dev)] == [2, 1]
    assert "dropped: 1 too long in train, 2 too long in dev" in summary(prepared.facts)


def test_long_pairs_of_dev_and_test_are_dropped(tmp_path: Path, toy: Tokenizer) -> None:
    pairs = {"train": PAIRS[:40], "dev": [LONG, *PAIRS[40:50]], "test": [*PAIRS[50:], LONG[::-1], LONG]}
    corpus = write_pairs(tmp_path / "data", pairs)
    prepared = run_prepare(tmp_path / "run", corpus, toy, max_length_tokens=20)
    assert all_of(prepared.dev) == encode_records(toy, [PairRecord(*pair) for pair in PAIRS[40:50]])
    assert "dropped: 1 too long in dev, 2 too long in test" in summary(prepared.facts)


@pytest.mark.parametrize("task", ["classification", "encoder"])
def test_long_texts_are_truncated_as_in_the_service(tmp_path: Path, toy: Tokenizer, task: TaskName) -> None:
    names = ("text", "label") if task == "classification" else ("source", "target")
    long = ("Hund " * 30, "a")
    rows = [(f"Katze {index}", "ab"[index % 2]) for index in range(12)]
    write_rows(tmp_path / "data", names, {"train": [long, *rows[:6]], "dev": [*rows[6:], long]})
    encode = partial(encode_records, labels="ab") if task == "classification" else encode_records
    prepared = run_prepare(tmp_path / "run", open_corpus(tmp_path / "data", Reading(task)), toy, encode, 20)
    (tmp_path / "tokenizer.json").write_text(toy.to_str(), encoding="utf-8")
    expected = read_served(tmp_path / "tokenizer.json").encode_truncated(long[0], 20)
    assert prepared.train[0][0] == prepared.dev[6][0] == expected and len(expected) == 20
    assert prepared.facts.dropped["train"].get("too long") == 0
    lines = summary(prepared.facts)
    assert "truncated to 20 tokens: 1 in train, 1 in dev" in lines
    assert any(line.startswith("warning: 1 of 7 examples of train are truncated") for line in lines)


def test_train_with_long_examples_only_is_an_error(tmp_path: Path, toy: Tokenizer) -> None:
    corpus = write_pairs(tmp_path / "data", {"train": [LONG], "dev": PAIRS[40:]})
    with pytest.raises(CorpusError) as caught:
        run_prepare(tmp_path / "run", corpus, toy, max_length_tokens=20)
    assert str(caught.value) == (
        "train.jsonl has no example of at most 20 tokens; shorten the texts, or increase --max-length-tokens"
    )


def test_a_file_that_changes_in_between_is_an_error(tmp_path: Path, toy: Tokenizer) -> None:
    corpus = write_pairs(tmp_path / "data", {"train": PAIRS[:40], "dev": PAIRS[40:]})
    facts = check_corpus(corpus)
    write_pairs(tmp_path / "data", {"train": PAIRS[:39]})
    with pytest.raises(CorpusError) as caught:
        prepare(tmp_path / "run", corpus, facts, toy, encode_records, 100)
    assert str(caught.value) == "train.jsonl changed while it was read; start again when it is complete"


def test_repeated_pairs_of_an_encoder_are_dropped(tmp_path: Path, toy: Tokenizer) -> None:
    write_pairs(tmp_path / "data", {"train": [*PAIRS[:3], *PAIRS[:2], *PAIRS[3:6]], "dev": PAIRS[40:42] * 2})
    corpus = open_corpus(tmp_path / "data", Reading("encoder"))
    prepared = run_prepare(tmp_path / "run", corpus, toy)
    assert all_of(prepared.train) == encode_records(toy, [PairRecord(*pair) for pair in PAIRS[:6]])
    assert prepared.facts.dropped["train"] == {"empty": 0, "repeated": 2, "too long": 0}
    assert len(prepared.dev) == 4
    lines = summary(prepared.facts)
    assert "dropped: 2 repeated in train" in lines
    assert "repeated, kept: 2 in dev" in lines


def test_sampled_records_of_dev_are_spread_over_the_file(tmp_path: Path, toy: Tokenizer) -> None:
    corpus = write_texts(tmp_path / "data", {"train": ["a"], "dev": [str(index) for index in range(1500)]})
    prepared = run_prepare(tmp_path / "run", corpus, toy, encode_windows)
    sample = [int(record.text) for record in prepared.dev_records if isinstance(record, TextRecord)]
    assert len(sample) == 1000 and sample[0] == 0 and sample[-1] == 1498
    assert {after - before for before, after in pairwise(sample)} == {1, 2}


def test_coverage_counts_tokens_that_train_has(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["abcd"], vocab_size=259)  # bytes only
    corpus = write_pairs(tmp_path / "data", {"train": [("ab", "ä")], "dev": [("abc", "é")], "test": [("b", "a")]})
    facts = run_prepare(tmp_path / "run", corpus, tokenizer).facts
    # Tokens of dev: a space, a, b, c, the end token; a space, the two bytes of é, of which ä has
    # the first, and the end token.
    assert facts.coverage == {"dev": 7 / 9, "test": 1.0}
    assert "vocabulary: train has 77.8% of the tokens of dev" in summary(facts)
    warning = "warning: train has only 77.8% of the tokens of dev; add examples like those of dev"
    assert warning in summary(facts) and warning not in summary(facts, is_trained=True)


def test_the_summary_warns(tmp_path: Path, toy: Tokenizer) -> None:
    rows: list[tuple[str, object]] = [(f"Hund {index}", "x") for index in range(30)]
    rows += [("Katze", "y"), ("Hund 1", "y"), ("Maus", "z"), *[(f"{index} Maus " * 30, "x") for index in range(2)]]
    corpus = write_labelled(tmp_path / "data", {"train": rows, "dev": [("Hund 1", "x"), ("Katze 1", "y")]})
    prepared = run_prepare(tmp_path / "run", corpus, toy, partial(encode_records, labels="xyz"), max_length_tokens=20)
    lines = summary(prepared.facts)
    assert [line for line in lines if line.startswith("warning: ")] == [
        "warning: train also has the texts of 1 of 2 examples of dev, which makes results on dev too good; remove them "
        "from train",
        "warning: fewer than 10 examples in dev, whose loss decides when the training ends; add some",
        "warning: texts with different labels: 1; correct them\n"
        "  'Hund 1': x (train.jsonl, line 2; dev.jsonl, line 1), y (train.jsonl, line 32)",
        "warning: fewer than 5 examples in train: y 2, z 1; add some",
        "warning: dev has no example of z; results do not show them, so add some",
        "warning: 2 of 35 examples of train are truncated, because they have more than 20 tokens; increase "
        "--max-length-tokens, or shorten them",
    ]
    assert lines[:5] == [
        "examples: train 35, dev 2",
        "dropped: none",
        "truncated to 20 tokens: 2 in train",
        "repeated, kept: none",
        "labels: 3: x 91.4%, y 5.7%, z 2.9%",
    ]


def test_facts_can_be_stored_as_json(tmp_path: Path, toy: Tokenizer) -> None:
    corpus = write_pairs(tmp_path / "data", {"train": PAIRS[:40], "dev": PAIRS[40:]})
    stored = json.loads(json.dumps(dataclasses.asdict(run_prepare(tmp_path / "run", corpus, toy).facts)))
    assert stored["examples"] == {"train": 40, "dev": 20}
    assert stored["tokens"]["dev"].keys() == {"total", "median", "percentile_95", "longest"}


def test_a_folder_without_write_access_is_an_error(tmp_path: Path) -> None:
    with locked(tmp_path / "new" / "run"), locked(tmp_path):
        pass
    (tmp_path / "file").touch()
    # Not even root can write to /proc.
    for path in (Path("/proc/run"), Path("/proc"), tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UsageError, match=rf"cannot write to the folder {path} \(.*\); .*choose another"):
            locked(path).__enter__()


def write_random_pairs(folder: Path, count: int) -> None:
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 8))) for _ in range(5_000)]
    for language in ("de", "en"):
        with (folder / f"train.{language}").open("w", encoding="utf-8") as file:
            file.writelines(" ".join(rng.choices(words, k=rng.randint(8, 16))) + "\n" for _ in range(count))


def test_a_pair_takes_few_bytes_of_memory(tmp_path: Path, toy: Tokenizer) -> None:
    """Both texts of a pair take about 300 bytes, and its example 1,000."""

    def encode(tokenizer: Tokenizer, records: Sequence[Record]) -> list[Example]:
        return [([1] * 60, [2] * 60) for _ in records]

    corpora = []
    for count in (1_050, 2_050):  # both have a whole chunk of records
        folder = tmp_path / str(count)
        folder.mkdir()
        write_random_pairs(folder, count)
        corpora.append(write_pairs(folder, {"dev": PAIRS}))
    peaks = []
    tracemalloc.start()
    try:
        for index, corpus in enumerate([corpora[0], *corpora]):  # the first fills caches
            tracemalloc.reset_peak()
            run_prepare(tmp_path / f"run {index}", corpus, toy, encode)
            peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert peaks[2] - peaks[1] < 30 * 1_000 + 50_000


@pytest.mark.slow
@pytest.mark.parametrize("num_words", [200_000, 4_000_000])
def test_320_000_pairs_take_less_than_300_mb_with_the_training_of_the_tokenizer(num_words: int) -> None:
    """With few and with many different words, of which 200,000 are about 1.4 MB."""
    command = [sys.executable, "-m", "tests.model.data.memory", "320000", str(num_words)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    phases = {row["phase"]: row["mb"] for row in map(json.loads, result.stdout.splitlines())}
    assert list(phases) == ["checked", "tokenizer trained", "encoded", "batches of an epoch"]
    assert max(phases.values()) < 300


def test_all_tasks_have_facts(tmp_path: Path) -> None:
    rows: dict[TaskName, str] = {
        "translation": '{"source": "%d", "target": "b"}\n',
        "encoder": '{"source": "%d", "target": "b"}\n',
        "classification": '{"text": "%d", "label": "b"}\n',
        "language-model": '{"text": "%d"}\n',
    }
    for task, row in rows.items():
        content = "".join(row % index for index in range(40))
        if task == "classification":
            content = content.replace('"b"', '"c"', 20)
        (tmp_path / "all.jsonl").write_text(content, encoding="utf-8")
        facts: Facts = check_corpus(open_corpus(tmp_path / "all.jsonl", Reading(task)))
        assert facts.task == task
        assert facts.examples == ({"train": 36, "dev": 4} if task == "encoder" else {"train": 38, "dev": 2})
        assert facts.split_seed == 1
        assert facts.overlap == {"dev": 0}
        assert (
            facts.labels == ({"b": 20, "c": 20} if task == "classification" else {}) or sum(facts.labels.values()) == 38
        )
