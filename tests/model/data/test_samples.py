"""Sample data of each task."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sightline.base.errors import UsageError
from sightline.model.data.corpus import open_corpus
from sightline.model.data.facts import check_corpus
from sightline.model.data.formats import Reading
from sightline.model.data.records import TASK_NAMES, TaskName
from sightline.model.data.samples import EXAMPLES, write_sample


def read_sample(folder: Path) -> dict[str, list[dict[str, Any]]]:
    files = {path.stem: path.read_text(encoding="utf-8").splitlines() for path in folder.iterdir()}
    return {name: [json.loads(line) for line in lines] for name, lines in files.items()}


@pytest.mark.parametrize("task", TASK_NAMES)
def test_a_sample_is_a_corpus_without_overlap(task: TaskName, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    assert write_sample(task, folder, 300) == {"train": 300, "dev": 60, "test": 60}
    facts = check_corpus(open_corpus(folder, Reading(task)))
    assert facts.examples == {"train": 300, "dev": 60, "test": 60}
    assert set(facts.overlap.values()) == {0}
    assert set(facts.repeated.values()) == {0}


@pytest.mark.parametrize("task", TASK_NAMES)
def test_the_file_has_all_examples(task: TaskName, tmp_path: Path) -> None:
    numbers = write_sample(task, tmp_path)
    assert numbers["train"] == EXAMPLES[task] and numbers["dev"] == numbers["test"] >= 100
    assert {name: len(rows) for name, rows in read_sample(tmp_path).items()} == numbers


def test_the_test_sentences_combine_words_as_train_never_does(tmp_path: Path) -> None:
    write_sample("translation", tmp_path)
    parts = read_sample(tmp_path)
    combined = {
        name: {match[0] for one in rows if (match := re.search(r"the (\w+) (town|lake|museum)", one["source"]))}
        for name, rows in parts.items()
    }
    assert combined["test"] and not combined["test"] & (combined["train"] | combined["dev"])


def test_the_last_messages_of_test_are_never_last_in_train(tmp_path: Path) -> None:
    write_sample("language-model", tmp_path)
    parts = read_sample(tmp_path)
    last = {name: {one["messages"][-2]["content"] for one in rows} for name, rows in parts.items()}
    assert last["test"] and not last["test"] & last["train"]


@pytest.mark.parametrize("number", [9, 5_001])
def test_a_number_beyond_the_limits_is_refused(number: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"translation must be between 10 and 5,000, got {number}"):
        write_sample("translation", tmp_path, number)


def test_files_of_others_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({}), encoding="utf-8")
    with pytest.raises(UsageError, match="has files, which could be yours"):
        write_sample("encoder", tmp_path, 20)
    assert (tmp_path / "train.jsonl").read_text(encoding="utf-8") == "{}"


def test_common_words_find_the_targets_of_most_pairs_but_not_of_all(tmp_path: Path) -> None:
    """The figure is in docs/how-to/train-an-embedding-model.md."""

    def words(text: str) -> set[str]:
        return set(re.findall(r"\w+", text.lower()))

    write_sample("encoder", tmp_path)
    pairs = read_sample(tmp_path)["test"]
    targets = [words(pair["target"]) for pair in pairs]
    num_found = 0
    for index, pair in enumerate(pairs):
        source = words(pair["source"])
        shares = [len(source & target) / len(source | target) for target in targets]
        num_found += shares[index] > max(shares[:index] + shares[index + 1 :])
    assert (num_found, len(pairs)) == (165, 200)
