"""The step `collect` keeps what fits its test set, and compares systems by the same samples."""

import json
import shutil
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from sacrebleu.metrics.bleu import BLEU

from lab.bench.record import Recorded, Result, write_result
from lab.study import collect
from lab.study.changes import CONTROLS, changes_table
from lab.study.headline import TEXTS, headline
from lab.study.lengths import caption_buckets
from lab.study.runs import TRANSLATING, runs_by_system
from lab.zoo.systems import PLAN
from sightline.model.evaluation.bleu import moses_lines
from tests.support.scored_runs import TEST, write_scores

SOURCES = ["A man sleeps.", "A dog runs over a very wide and green field.", "She reads.", "Two men wait for a bus."] * 5
REFERENCES = ["Ein Mann schläft.", "Ein Hund rennt über ein weites Feld.", "Sie liest.", "Zwei Männer warten."] * 5
GOOD = ["Ein Mann schläft.", "Ein Hund rennt über ein grünes Feld.", "Sie liest.", "Zwei Männer warten hier."] * 5
BAD = ["Ein Mann schläft.", "Ein Hund schläft.", "Sie liest.", "Ein Mann wartet hier."] * 5
MakeRun = Callable[[str, Sequence[str]], Path]
Collect = Callable[..., Result]


@pytest.fixture
def make_run(tmp_path: Path, checkpoint: Path) -> MakeRun:
    """Write a test set, and return a function that creates a finished run with given outputs."""
    for ending, lines in {"en": SOURCES, "de": REFERENCES, "lc.norm.tok.de": moses_lines(REFERENCES, "de")}.items():
        (tmp_path / f"{TEST}.{ending}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def make(name: str, outputs: Sequence[str]) -> Path:
        run = tmp_path / "runs" / name
        write_scores(run, tmp_path, outputs)
        shutil.copytree(checkpoint, run / "averaged")
        return run

    return make


@pytest.fixture
def collected(tmp_path: Path) -> Collect:
    def run(keep: bool = False) -> Result:
        return collect.measure(Namespace(runs=tmp_path / "runs", data=tmp_path, keep=keep, results=tmp_path))

    return run


def lines_of(text: str) -> Mapping[str, list[str]]:
    """Return the rows of a table by their first cells."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row for row in rows}


def test_runs_of_several_machines_are_merged(tmp_path: Path, make_run: MakeRun, collected: Collect) -> None:
    """If both have a run, the one in the folder is used; runs of another test set are an error."""
    with pytest.raises(FileNotFoundError, match="has no result of collect"):
        collected(keep=True)
    make_run("luong-dot-1", GOOD)
    make_run("bahdanau-2", BAD)
    make_run("sentiment-1", GOOD)  # it does not translate
    first = collected()
    assert list(runs_by_system(first)) == ["bahdanau", "luong-dot"]
    write_result(tmp_path, collect.NAME, Recorded({"commit": "c0ffee"}, "", first))
    shutil.rmtree(tmp_path / "runs")
    make_run("bahdanau-2", GOOD)
    make_run("bahdanau-1", BAD)
    runs = runs_by_system(collected(keep=True))
    assert runs["luong-dot"] == [{**run, "commit": "c0ffee"} for run in runs_by_system(first)["luong-dot"]]
    assert [(run["seed"], run["epochs"], run["updates"]) for run in runs["bahdanau"]] == [(1, 3, 30), (2, 3, 30)]
    assert runs["bahdanau"] == runs_by_system(collected())["bahdanau"]
    path = tmp_path / f"{TEST}.en"
    path.write_text(path.read_text(encoding="utf-8").replace("She", "Now she"), encoding="utf-8")
    with pytest.raises(ValueError, match="is for another test set; run without --keep"):
        collected(keep=True)


@pytest.mark.parametrize(
    ("name", "outputs", "message"),
    [
        ("banana-1", GOOD, "banana-1 must be named SYSTEM-SEED"),
        ("bahdanau-1", BAD, r"bahdanau-1/scores.json states tokenized BLEU"),
        ("bahdanau-1", GOOD[:3], "must have 20 outputs of test_2016_flickr, got 3"),
    ],
)
def test_runs_that_contradict_their_scores_are_rejected(
    make_run: MakeRun, collected: Collect, name: str, outputs: list[str], message: str
) -> None:
    path = make_run(name, GOOD) / "scores.json"
    document = {**json.loads(path.read_text(encoding="utf-8")), "outputs": outputs}
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        collected()


def test_systems_are_compared_by_the_means_of_their_seeds(make_run: MakeRun, collected: Collect) -> None:
    for name, outputs in (("bahdanau-1", GOOD), ("bahdanau-2", BAD), ("fixed-context-1", BAD), ("luong-dot-1", BAD),
                          ("luong-general-short-1", GOOD), ("transformer-1", REFERENCES)):  # fmt: skip
        make_run(name, outputs)
    result = collected()
    good, bad = (run["tokenised_bleu"]["value"] for run in runs_by_system(result)["bahdanau"])
    rows = lines_of(headline(result)["headline"])
    assert rows["`bahdanau`"][2].startswith(f"{(good + bad) / 2:.1f} ")
    assert rows["`bahdanau`"][3] == f"{good:.1f}, {bad:.1f}"
    assert float(rows["`bahdanau`"][4].split()[0]) == pytest.approx((good - bad) / 2, abs=0.05)
    assert rows["`transformer`"][2:5] == ["100.0 ± 0.0", "", ""]
    changes = lines_of(changes_table(result)["changes"])
    assert changes["`luong-dot`"][3] == "`luong-general-short`"
    assert float(changes["`luong-dot`"][4].split()[0]) == pytest.approx(bad - good, abs=0.05)


def test_the_score_of_a_bucket_equals_sacrebleus(make_run: MakeRun, collected: Collect) -> None:
    make_run("bahdanau-1", GOOD)
    buckets = caption_buckets(collected())
    assert [(bucket.name, bucket.num_sentences) for bucket in buckets] == [("1 to 8", 15), ("9 to 10", 5)]
    long_ones = [index for index, source in enumerate(SOURCES) if len(source.split()) > 8]
    outputs, references = (moses_lines([lines[index] for index in long_ones], "de") for lines in (GOOD, REFERENCES))
    expected = BLEU(tokenize="none", force=True).corpus_score(outputs, [references]).score
    assert buckets[1].bleu["bahdanau"].value == pytest.approx(expected)
    low, high = buckets[0].bleu["bahdanau"].interval
    assert low <= buckets[0].bleu["bahdanau"].value <= high


def test_every_system_with_one_change_has_a_baseline_trained_as_long() -> None:
    short = {name for name, planned in PLAN.items() if name in TRANSLATING and planned.epochs == 12}
    assert short | {"hard-marginal"} == CONTROLS.keys() == set(TRANSLATING) - TEXTS.keys()
    alone = {name for name, (control, _) in CONTROLS.items() if control is None}
    assert alone == {"fixed-context-short", "post-norm-short", "hard-marginal"}
    assert {control for control, _ in CONTROLS.values() if control} <= short
