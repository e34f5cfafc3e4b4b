"""Sample data of each task."""

import json
import re
from pathlib import Path

import pytest

from sightline.base.errors import UsageError
from sightline.model.data.corpus import open_corpus
from sightline.model.data.formats import Reading
from sightline.model.data.preparation import check_corpus
from sightline.model.data.records import TASK_NAMES, TaskName
from sightline.model.data.samples import draw_sample, write_sample


@pytest.mark.parametrize("task", TASK_NAMES)
def test_a_sample_is_a_corpus_without_overlap(task: TaskName, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    assert write_sample(task, folder, 300) == {"train": 300, "dev": 60, "test": 60}
    facts = check_corpus(open_corpus(folder, Reading(task)))
    assert facts.examples == {"train": 300, "dev": 60, "test": 60}
    assert set(facts.overlap.values()) == {0}
    assert set(facts.repeated.values()) == {0}


@pytest.mark.parametrize("task", TASK_NAMES)
def test_the_seed_determines_a_sample(task: TaskName) -> None:
    assert draw_sample(task, 20, 3) == draw_sample(task, 20, 3) != draw_sample(task, 20, 4)


def test_the_test_sentences_combine_words_as_train_never_does() -> None:
    parts = draw_sample("translation", 2_000)
    combined = {
        name: {match[0] for one in rows if (match := re.search(r"the (\w+) (town|lake|museum)", one["source"]))}
        for name, rows in parts.items()
    }
    assert combined["test"] and not combined["test"] & (combined["train"] | combined["dev"])


def test_german_articles_and_verbs_agree() -> None:
    for one in draw_sample("translation", 500)["train"]:
        target = one["target"]
        assert not re.search(r"\b(zum \w+ (Stadt|Burg|Insel|Brücke)|zur \w+ (See|Dorf|Markt|Strand))\b", target)
        assert not re.search(r"\b(mein Bruder|das Mädchen) (fahren|besuchen|sehen)\b", target)
        assert not re.search(r"\b[Ww]ir (fährt|besucht|sieht)\b", target)


def test_the_last_messages_of_test_are_never_last_in_train() -> None:
    parts = draw_sample("language-model", 500)
    last = {name: {one["messages"][-2]["content"] for one in rows} for name, rows in parts.items()}
    assert last["test"] and not last["test"] & last["train"]


@pytest.mark.parametrize("number", [9, 50_001])
def test_a_number_beyond_the_limits_is_refused(number: int) -> None:
    with pytest.raises(UsageError, match=f"must be between 10 and 50,000, got {number}"):
        draw_sample("translation", number)


def test_files_of_others_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({}), encoding="utf-8")
    with pytest.raises(UsageError, match="has files, which could be yours"):
        write_sample("encoder", tmp_path, 20)
    assert (tmp_path / "train.jsonl").read_text(encoding="utf-8") == "{}"


def test_common_words_find_the_targets_of_most_pairs_but_not_of_all() -> None:
    """The figure is in docs/how-to/train-an-embedding-model.md."""

    def words(text: str) -> set[str]:
        return set(re.findall(r"\w+", text.lower()))

    pairs = draw_sample("encoder", 1_000)["test"]
    targets = [words(pair["target"]) for pair in pairs]
    num_found = 0
    for index, pair in enumerate(pairs):
        source = words(pair["source"])
        shares = [len(source & target) / len(source | target) for target in targets]
        num_found += shares[index] > max(shares[:index] + shares[index + 1 :])
    assert (num_found, len(pairs)) == (165, 200)
