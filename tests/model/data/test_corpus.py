import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest

from sightline.model.data.corpus import MAX_DEV_RECORDS, MAX_LABELS, Corpus, hash_texts, open_corpus
from sightline.model.data.files import CorpusError
from sightline.model.data.formats import Reading
from sightline.model.data.records import TASK_NAMES, LabelledRecord, PairRecord, TaskName, TextRecord, texts_of
from sightline.model.data.tagged_files import TAGGED
from tests.support.tables import read_table


def write(folder: Path, files: Mapping[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def lines(count: int, start: int = 0) -> str:
    return "".join(f"text {number}\n" for number in range(start, start + count))


def labelled(labels: list[str]) -> str:
    return "".join(json.dumps({"text": f"text {index}", "label": label}) + "\n" for index, label in enumerate(labels))


def error_of(
    data: Path, task: TaskName, source: str | None = None, target: str | None = None, multi_label: bool = False
) -> str:
    with pytest.raises(CorpusError) as caught:
        open_corpus(data, Reading(task, source=source, target=target, multi_label=multi_label))
    return str(caught.value)


def names(corpus: Corpus) -> list[str]:
    return [f"{split.name}: {split}" for split in corpus.splits]


@pytest.mark.parametrize("alias", ["dev", "val", "valid", "validation"])
def test_splits_are_found_by_their_names_in_any_formats(tmp_path: Path, alias: str) -> None:
    pair = '{"source": "a", "target": "b"}\n'
    folder = write(
        tmp_path, {"train.de": "eins\nzwei\n", "train.en": "one\ntwo\n", f"{alias}.jsonl": pair, "README": "no data"}
    )
    (tmp_path / "test.csv").write_text("target,source\nd,c\n", encoding="utf-8")
    corpus = open_corpus(folder, Reading("translation", source="de"))
    assert names(corpus) == ["train: train.de and train.en", f"dev: {alias}.jsonl", "test: test.csv"]
    assert list(corpus.train) == [PairRecord("eins", "one"), PairRecord("zwei", "two")]
    assert list(corpus.dev) == [PairRecord("a", "b")]
    assert corpus.test is not None
    assert list(corpus.test) == [PairRecord("c", "d")]
    assert corpus.languages == ("de", "en")
    assert corpus.split_seed is None
    assert corpus.digests.keys() == {"train.de", "train.en", f"{alias}.jsonl", "test.csv"}
    assert corpus.digests["train.en"] == hashlib.sha256(b"one\ntwo\n").hexdigest()


def test_a_corpus_without_test_has_none(tmp_path: Path) -> None:
    corpus = open_corpus(write(tmp_path, {"train.txt": lines(3), "dev.txt": lines(1)}), Reading("language-model"))
    assert corpus.test is None
    assert names(corpus) == ["train: train.txt", "dev: dev.txt"]
    assert corpus.languages is None


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("zh", "de", ("zh", "de")),
        ("zh-Hans", None, ("zh-Hans", "de-CH")),
        (None, "de-CH", ("zh-Hans", "de-CH")),
        ("zh-Hans", "de-CH", ("zh-Hans", "de-CH")),
    ],
)
def test_languages_come_from_names_of_files_or_options(
    tmp_path: Path, source: str | None, target: str | None, expected: tuple[str, str]
) -> None:
    folder = write(tmp_path, {"train.de-CH": "de-CH\n" * 3, "train.zh-Hans": "zh-Hans\n" * 3})
    for split in ("dev.de-CH", "dev.zh-Hans"):
        (folder / split).write_text("other\n", encoding="utf-8")
    corpus = open_corpus(folder, Reading("translation", source=source, target=target))
    assert corpus.languages == expected
    files = {language[:2]: path for path in ("de-CH", "zh-Hans") for language in (path,)}
    assert next(iter(corpus.train)) == PairRecord(files[expected[0][:2]], files[expected[1][:2]])


def test_files_of_private_languages_are_found_and_other_endings_are_none(tmp_path: Path) -> None:
    endings = ("x-elvish", "en-x-mine", "bak", "e", "deutsch")
    folder = write(tmp_path, {f"train.{one}": "a\nb\n" for one in endings[:2]})
    assert open_corpus(folder, Reading("translation", source="en-x-mine")).languages == ("en-x-mine", "x-elvish")
    with pytest.raises(CorpusError, match=r"missing file train in .*train\.deutsch, train\.e;"):
        open_corpus(
            write(tmp_path / "other", {f"train.{one}": "a\nb\n" for one in endings[3:]}), Reading("translation")
        )


def test_language_tags_in_any_case_name_the_files_as_they_are(tmp_path: Path) -> None:
    names = [f"{split}.{tag}" for split in ("train", "dev") for tag in ("EN", "De-de")]
    folder = write(tmp_path, {name: f"{name}\n" for name in names})
    assert open_corpus(folder, Reading("translation", source="EN", target="De-de")).languages == ("EN", "De-de")
    assert open_corpus(folder, Reading("translation", source="en", target="de")).languages == ("en", "de")
    same = "source and target must be different languages, got EN for both"
    assert error_of(folder, "translation", source="EN", target="en") == same


def test_options_choose_among_several_languages_and_other_endings(tmp_path: Path) -> None:
    endings = ("cs", "de", "en", "question")
    folder = write(tmp_path, {f"{split}.{one}": f"{one}\n" for split in ("train", "val") for one in endings})
    corpus = open_corpus(folder, Reading("encoder", source="question", target="en"))
    assert list(corpus.train) == [PairRecord("question", "en")]
    direction = f"are cs, de, en; name the direction: sightline train translation {folder} --run RUN --source cs"
    assert direction in error_of(folder, "translation")
    assert "are cs, de, en; name the direction" in error_of(folder, "translation", source="de")
    assert "are cs, de, en, but not fr; name the direction" in error_of(folder, "translation", source="de", target="fr")


def test_languages_of_options_are_recorded_for_other_formats(tmp_path: Path) -> None:
    folder = write(tmp_path, {"train.tsv": "source\ttarget\na\tb\nc\td\n", "dev.tsv": "source\ttarget\ne\tf\n"})
    (folder / "train.log").touch()  # one file that could be a language has no partner
    assert open_corpus(folder, Reading("translation", source="de", target="en")).languages == ("de", "en")
    assert open_corpus(folder, Reading("translation")).languages is None


@pytest.mark.parametrize(("files", "task", "problem"), read_table(__file__))
def test_two_candidates_for_a_split_are_an_error_that_names_both(
    tmp_path: Path, files: list[str], task: TaskName, problem: str
) -> None:
    folder = write(tmp_path, dict.fromkeys(files, ""))
    assert error_of(folder, task) == f"{folder} has {problem}; remove one of them"


def test_plain_text_is_for_language_models_only(tmp_path: Path) -> None:
    folder = write(tmp_path, {"train.txt": lines(1), "train.tsv": "text\tlabel\na\tx\nb\ty\nc\tx\n"})
    assert names(open_corpus(folder, Reading("classification")))[0] == "train: train.tsv"


FOLDER = "or a folder with the files train and, optionally, dev and test in one of these formats"


@pytest.mark.parametrize("task", TASK_NAMES)
def test_missing_data_is_named_with_the_formats_of_the_task(tmp_path: Path, task: TaskName) -> None:
    formats = ".jsonl, .ndjson, .json, .tsv, .csv, .xlsx, .xls, .ods or .txt"
    if task in ("translation", "encoder", "reranking"):
        formats = formats.replace(".ods", ".ods, .tmx, .xlf, .xliff, .sdlxliff, .mqxliff, .mxliff")
    pairs = " or as two files, such as train.de and train.en" if task in ("translation", "encoder", "reranking") else ""
    if task == "tagging":
        formats = f"{', '.join(TAGGED[:-1])} or {TAGGED[-1]}"
    expected = f"{task} needs a file in the format {formats}, {FOLDER}{pairs}"
    assert error_of(tmp_path / "data", task) == f"missing file or folder {tmp_path / 'data'}; {expected}"
    for name, way_out in (("data.foo", ""), ("data.zip", "unpack it; ")):
        (tmp_path / name).touch()
        assert error_of(tmp_path / name, task) == f"{tmp_path / name} has an unsupported format; {way_out}{expected}"
    empty = write(tmp_path / "empty", {})
    name_it = "name one train, or give the file itself; "
    assert error_of(empty, task) == f"missing file train in {empty}, which has no files; {name_it}{expected}"
    (empty / "dev.tsv").touch()
    assert error_of(empty, task) == f"missing file train in {empty}, which has dev.tsv; {name_it}{expected}"


def test_missing_sides_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path, {"train.de": "a\n", "train.en": "a\n", "val.en": "b\n"})
    assert error_of(folder, "translation", source="de") == (
        "dev has val.en, but needs de and en as train; add, rename or remove files"
    )


def test_options_that_have_no_effect_are_errors(tmp_path: Path) -> None:
    folder = write(tmp_path, {"train.txt": "a\nb\n"})
    assert error_of(folder, "language-model", source="de") == (
        "source and target are languages of translation and encoder and reranking; omit them for language-model"
    )
    assert error_of(folder, "translation", source="de", target="de") == (
        "source and target must be different languages, got de for both"
    )
    assert error_of(folder, "language-model", multi_label=True) == (
        "several labels a text are possible for classification only; omit the option for language-model"
    )


@pytest.mark.parametrize(("count", "num_dev"), [(2, 1), (19, 1), (300, 15), (1_000, 50)])
def test_one_file_is_divided_by_a_seed(tmp_path: Path, count: int, num_dev: int) -> None:
    path = tmp_path / "all.txt"
    path.write_text(lines(count), encoding="utf-8")
    corpus = open_corpus(path, Reading("language-model"), 3)
    train, dev = list(corpus.train), list(corpus.dev)
    assert len(dev) == num_dev
    assert len(train) == count - num_dev
    assert set(train) | set(dev) == {TextRecord(f"text {number}") for number in range(count)}
    assert corpus.split_seed == 3
    again = open_corpus(path, Reading("language-model"), 3)
    assert (list(again.train), list(again.dev)) == (train, dev)
    if num_dev > 1:
        assert list(open_corpus(path, Reading("language-model"), 4).dev) != dev


@pytest.mark.parametrize(("count", "num_dev"), [(2, 1), (3, 1), (7, 3), (8, 4), (20, 4), (200, 10)])
def test_dev_of_an_encoder_has_pairs_to_compare(tmp_path: Path, count: int, num_dev: int) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text("source\ttarget\n" + "".join(f"{number}\tx{number}\n" for number in range(count)), encoding="utf-8")
    for task, expected in (("encoder", num_dev), ("translation", max(1, count // 20))):
        corpus = open_corpus(path, Reading(cast(TaskName, task)))
        assert (len(list(corpus.dev)), len(list(corpus.train))) == (expected, count - expected)


def test_dev_has_at_most_1_000_records(tmp_path: Path) -> None:
    path = tmp_path / "all.txt"
    path.write_text(lines(20_200), encoding="utf-8")
    assert sum(1 for _ in open_corpus(path, Reading("language-model")).dev) == MAX_DEV_RECORDS == 1_000


def test_a_folder_without_dev_is_divided_in_the_same_way(tmp_path: Path) -> None:
    folder = write(tmp_path, {"train.txt": lines(100), "test.txt": lines(5, start=100)})
    corpus, of_file = (open_corpus(data, Reading("language-model")) for data in (folder, folder / "train.txt"))
    assert list(corpus.dev) == list(of_file.dev)
    assert corpus.test is not None
    assert len(list(corpus.test)) == 5
    assert corpus.digests.keys() == {"train.txt", "test.txt"}


def test_equal_texts_are_in_the_same_part(tmp_path: Path) -> None:
    path = tmp_path / "all.txt"
    path.write_text(lines(40) * 5, encoding="utf-8")
    corpus = open_corpus(path, Reading("language-model"))
    train, dev = list(corpus.train), list(corpus.dev)
    assert not set(train) & set(dev)
    assert len(dev) == 10 and len(train) == 190


def slow_division(records: list[LabelledRecord], seed: int) -> set[str]:
    """Return the texts of dev by the documented rule."""
    counts = Counter(label for text, labels in {(one.text, one.labels) for one in records} for label in labels)
    order = list(dict.fromkeys(label for one in records for label in one.labels))
    first = {next(one.text for one in records if label in one.labels) for label in order}
    groups: dict[str, set[str]] = {}
    for text in {one.text for one in records}:
        own = {label for one in records if one.text == text for label in one.labels}
        groups.setdefault(min(own, key=lambda label: counts[label], default=""), set()).add(text)
    dev = set()
    for texts in groups.values():
        ordered = sorted(texts - first, key=lambda text: hash_texts([text], seed))
        dev.update(ordered[: max(1, round(0.05 * len(texts)))])
    return dev


@pytest.mark.parametrize("multi_label", [False, True])
def test_dev_has_a_share_of_each_label_and_train_keeps_one(tmp_path: Path, multi_label: bool) -> None:
    path = tmp_path / "all.jsonl"
    sizes = {"a": 200, "b": 57, "c": 30, "d": 2, "e": 1}
    rows: list[dict[str, object]] = [
        {"text": f"{label} {index}", "labels" if multi_label else "label": [label] if multi_label else label}
        for label, size in sizes.items()
        for index in range(size)
    ]
    if multi_label:
        rows += [{"text": f"x {index}", "labels": ["a", "bcd"[index % 3]]} for index in range(20)]
        rows += [{"text": "none", "labels": []}, {"text": "none 2", "labels": []}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for seed in range(3):
        corpus = open_corpus(path, Reading("classification", multi_label=multi_label), seed)
        train, dev = (cast(list[LabelledRecord], list(part)) for part in (corpus.train, corpus.dev))
        assert {one.text for one in dev} == slow_division([*train, *dev], seed)
        counts = Counter(label for one in dev for label in one.labels)
        if not multi_label:
            assert counts == {"a": 10, "b": 3, "c": 2, "d": 1}
        assert {label for one in train for label in one.labels} == set(sizes)


@pytest.mark.parametrize("content", ["one\n", "one\none\n"])
def test_too_few_texts_cannot_be_divided(tmp_path: Path, content: str) -> None:
    folder = write(tmp_path, {"train.txt": content})
    assert error_of(folder, "language-model") == (
        "train.txt has too few different examples (1) to keep one for dev; add examples, or add a file dev"
    )


@pytest.mark.parametrize("content", ["\n", ""])
def test_an_empty_file_cannot_be_divided(tmp_path: Path, content: str) -> None:
    folder = write(tmp_path, {"train.txt": content})
    assert (
        error_of(folder, "language-model")
        == "train.txt is empty or has only blank texts or dialogues without replies; add examples"
    )


def test_texts_that_are_all_needed_for_their_labels_cannot_be_divided(tmp_path: Path) -> None:
    folder = write(tmp_path, {"train.jsonl": labelled(["a", "b", "c"])})
    assert error_of(folder, "classification").startswith("train.jsonl has too few different examples (3) to keep one")


def test_texts_in_the_place_of_labels_are_an_error_before_they_fill_the_memory(tmp_path: Path) -> None:
    folder = write(tmp_path, {"train.jsonl": labelled([f"text {index}" for index in range(MAX_LABELS + 1)])})
    assert error_of(folder, "classification") == (
        "train.jsonl has more than 10,000 different labels; check that text and label are not swapped"
    )


def test_lines_are_those_of_the_files(tmp_path: Path) -> None:
    folder = write(
        tmp_path, {"train.de": "a\n\nb\n", "train.en": "a\nx\nb\n", "dev.csv": 'source,target\n"c\nc",c\nd,d\n'}
    )
    corpus = open_corpus(folder, Reading("translation", source="de"))
    lines_of = [[split.line(number) for number, _ in split.numbered()] for split in (corpus.train, corpus.dev)]
    assert lines_of[0] == [f"train.de and train.en, line {number}" for number in (1, 2, 3)]
    assert lines_of[1] == ["dev.csv, line 2", "dev.csv, line 4"]


def test_lines_of_a_divided_file_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "all.txt"
    path.write_text("\n" + lines(50), encoding="utf-8")
    corpus = open_corpus(path, Reading("language-model"))
    for split in (corpus.train, corpus.dev):
        for number, record in split.numbered():
            if not isinstance(record, str):
                (text,) = texts_of(record)
                assert number == int(text.removeprefix("text ")) + 2


def test_one_language_of_pairs_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text("source\ttarget\na\tb\nc\td\n", encoding="utf-8")
    with pytest.raises(CorpusError, match=r"one language of .* is given, en; give both"):
        open_corpus(path, Reading("translation", source="en"))
