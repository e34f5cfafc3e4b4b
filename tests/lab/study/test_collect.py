import dataclasses
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
from sightline.model.evaluation.bleu import moses_lines, read_test_set, score
from sightline.model.training.train_config import Precision, TrainConfig, train_config_to_json

SOURCES = ["A man sleeps.", "A dog runs over a very wide and green field.", "She reads.", "Two men wait for a bus."] * 5
REFERENCES = ["Ein Mann schläft.", "Ein Hund rennt über ein weites Feld.", "Sie liest.", "Zwei Männer warten."] * 5
GOOD = ["Ein Mann schläft.", "Ein Hund rennt über ein grünes Feld.", "Sie liest.", "Zwei Männer warten hier."] * 5
BAD = ["Ein Mann schläft.", "Ein Hund schläft.", "Sie liest.", "Ein Mann wartet hier."] * 5
MakeRun = Callable[[str, Sequence[str]], Path]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    tokenised = [line.lower().replace(".", " .") for line in REFERENCES]
    for ending, lines in {"en": SOURCES, "de": REFERENCES, "lc.norm.tok.de": tokenised}.items():
        text = "".join(f"{line}\n" for line in lines)
        (folder / f"test_2016_flickr.{ending}").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def make_run(tmp_path: Path, data: Path, checkpoint: Path) -> MakeRun:
    """Return a function that creates a finished run with given outputs."""

    def make(name: str, outputs: Sequence[str]) -> Path:
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        shutil.copytree(checkpoint, run / "averaged")
        tokens = 4096 if name.startswith("transformer") else 2000
        precision: Precision = "bfloat16" if name.endswith("-2") else "float32"
        (run / "train.json").write_text(
            train_config_to_json(TrainConfig(batch_tokens=tokens, precision=precision)), encoding="utf-8"
        )
        # One epoch was trained after the scores.
        log = "".join(json.dumps({"epoch": epoch, "step": 10 * epoch}) + "\n" for epoch in range(1, 5))
        (run / "log.jsonl").write_text(log, encoding="utf-8")
        write_scores(run / "scores.json", data, outputs)
        return run

    return make


def write_scores(path: Path, data: Path, outputs: Sequence[str]) -> None:
    scores = score(outputs, read_test_set(data, "test_2016_flickr", "en", "de"), "de")
    facts = {"split": "test_2016_flickr", "num_beams": 5, "length_penalty": 1.0, "checkpoint": {"epochs": [2, 3]}}
    document = {**facts, **dataclasses.asdict(scores), "outputs": outputs}
    path.write_text(json.dumps(document), encoding="utf-8")


def replace_outputs(run: Path, outputs: Sequence[str]) -> None:
    path = run / "scores.json"
    document = {**json.loads(path.read_text(encoding="utf-8")), "outputs": outputs}
    path.write_text(json.dumps(document), encoding="utf-8")


@pytest.fixture
def collected(tmp_path: Path, data: Path) -> Callable[..., Result]:
    def run(keep: bool = False) -> Result:
        return collect.measure(Namespace(runs=tmp_path / "runs", data=data, keep=keep, results=tmp_path))

    return run


def lines_of(text: str) -> Mapping[str, list[str]]:
    """Return the rows of a table by their first cells."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row for row in rows}


def test_runs_are_read_with_their_budgets(make_run: MakeRun, collected: Callable[[], Result]) -> None:
    make_run("bahdanau-1", GOOD)
    (run,) = runs_by_system(collected())["bahdanau"]
    assert (run["seed"], run["epochs"], run["updates"], run["batch_tokens"]) == (1, 3, 30, 2000)
    assert len(run["output_lengths"]) == len(SOURCES)


def test_runs_without_scores_or_translations_are_skipped(make_run: MakeRun, collected: Callable[[], Result]) -> None:
    (make_run("bahdanau-1", GOOD) / "scores.json").unlink()
    make_run("sentiment-1", GOOD)
    make_run("linformer-1", GOOD)
    assert list(runs_by_system(collected())) == ["linformer"]


def test_runs_of_several_machines_are_merged(
    tmp_path: Path, make_run: MakeRun, collected: Callable[..., Result]
) -> None:
    """If both have a run, the one in the folder is used."""
    with pytest.raises(FileNotFoundError, match="has no result of collect"):
        collected(keep=True)
    make_run("luong-dot-1", GOOD)
    make_run("bahdanau-2", BAD)
    first = collected()
    write_result(tmp_path, collect.NAME, Recorded({"commit": "c0ffee"}, "", first))
    shutil.rmtree(tmp_path / "runs")
    make_run("bahdanau-2", GOOD)
    make_run("bahdanau-1", BAD)
    runs = runs_by_system(collected(keep=True))
    assert runs["luong-dot"] == [{**run, "commit": "c0ffee"} for run in runs_by_system(first)["luong-dot"]]
    assert [run["seed"] for run in runs["bahdanau"]] == [1, 2]
    assert runs["bahdanau"] == runs_by_system(collected())["bahdanau"]


def test_runs_of_another_test_set_are_not_kept(
    tmp_path: Path, data: Path, make_run: MakeRun, collected: Callable[..., Result]
) -> None:
    make_run("luong-dot-1", GOOD)
    write_result(tmp_path, collect.NAME, Recorded({"commit": "c0ffee"}, "", collected()))
    path = data / "test_2016_flickr.en"
    path.write_text(path.read_text(encoding="utf-8").replace("She", "Now she"), encoding="utf-8")
    with pytest.raises(ValueError, match="is for another test set; run without --keep"):
        collected(keep=True)


def test_runs_with_unknown_names_are_rejected(make_run: MakeRun, collected: Callable[[], Result]) -> None:
    make_run("banana-1", GOOD)
    with pytest.raises(ValueError, match="banana-1 must be named SYSTEM-SEED"):
        collected()


def test_outputs_that_contradict_their_score_are_rejected(make_run: MakeRun, collected: Callable[[], Result]) -> None:
    replace_outputs(make_run("bahdanau-1", GOOD), BAD)
    with pytest.raises(ValueError, match=r"bahdanau-1/scores.json states tokenized BLEU"):
        collected()


def test_outputs_of_other_sentences_are_rejected(make_run: MakeRun, collected: Callable[[], Result]) -> None:
    replace_outputs(make_run("bahdanau-1", GOOD), GOOD[:3])
    with pytest.raises(ValueError, match="must have 20 outputs of test_2016_flickr, got 3"):
        collected()


def test_the_table_has_each_seed_and_the_number_of_seeds(make_run: MakeRun, collected: Callable[[], Result]) -> None:
    make_run("bahdanau-1", GOOD)
    make_run("bahdanau-2", BAD)
    make_run("fixed-context-1", BAD)
    make_run("hard-marginal-1", GOOD)
    make_run("transformer-1", REFERENCES)
    result = collected()
    first, second = (run["tokenised_bleu"]["value"] for run in runs_by_system(result)["bahdanau"])
    rows = lines_of(headline(result)["headline"])
    assert rows["`bahdanau`"][2].startswith(f"{(first + second) / 2:.1f} ")
    assert rows["`bahdanau`"][3] == f"{first:.1f}, {second:.1f} (2 of 3 seeds)"
    assert float(rows["`bahdanau`"][4].split()[0]) == pytest.approx((first - second) / 2, abs=0.05)
    assert rows["`bahdanau`"][7] == "3"
    assert "bfloat16](training.md#precision): `bahdanau-2`; all others in float32." in headline(result)["trainings"]
    assert rows["`transformer`"][2:5] == ["100.0 ± 0.0", "", ""]
    assert list(rows)[2:] == ["`fixed-context`", "`bahdanau`", "`transformer`"]
    assert lines_of(changes_table(result)["changes"])["`hard-marginal`"][2].startswith(f"{first:.1f} ")
    assert (
        "Each update reads at most 2,000 padded tokens; that of `transformer` 4,096." in headline(result)["trainings"]
    )


@pytest.mark.parametrize(("outputs", "verdict"), [(REFERENCES, "is reached"), (BAD, "is **not reached**")])
def test_the_table_says_if_the_target_is_reached(
    make_run: MakeRun, collected: Callable[[], Result], outputs: list[str], verdict: str
) -> None:
    make_run("bahdanau-1", outputs)
    assert f"37 tok-lc, {verdict}." in headline(collected())["trainings"]


def test_the_score_of_a_bucket_equals_sacrebleus(make_run: MakeRun, collected: Callable[[], Result]) -> None:
    make_run("bahdanau-1", GOOD)
    make_run("fixed-context-1", BAD)
    buckets = caption_buckets(collected())
    assert [(bucket.name, bucket.num_sentences) for bucket in buckets] == [("1 to 8", 15), ("9 to 10", 5)]
    long_ones = [index for index, source in enumerate(SOURCES) if len(source.split()) > 8]
    tokenised = [line.lower().replace(".", " .") for line in REFERENCES]
    for name, outputs in (("bahdanau", GOOD), ("fixed-context", BAD)):
        lines = moses_lines([outputs[index] for index in long_ones], "de")
        metric = BLEU(tokenize="none", force=True)
        expected = metric.corpus_score(lines, [[tokenised[index] for index in long_ones]]).score
        assert buckets[1].bleu[name].value == pytest.approx(expected)
        low, high = buckets[0].bleu[name].interval
        assert low <= buckets[0].bleu[name].value <= high


def test_a_change_is_compared_with_a_system_trained_as_long(
    make_run: MakeRun, collected: Callable[..., Result]
) -> None:
    make_run("luong-dot-1", BAD)
    assert lines_of(changes_table(collected())["changes"])["`luong-dot`"][3:] == ["", ""]
    make_run("luong-general-short-1", GOOD)
    make_run("bahdanau-short-1", GOOD)
    result = collected()
    runs = runs_by_system(result)
    theirs, ours = (runs[name][0]["tokenised_bleu"]["value"] for name in ("luong-general-short", "luong-dot"))
    rows = lines_of(changes_table(result)["changes"])
    assert list(rows)[2:] == ["`bahdanau-short`", "`luong-general-short`", "`luong-dot`"]
    assert rows["`luong-general-short`"][2].startswith(f"{theirs:.1f} ")
    assert rows["`luong-dot`"][3] == "`luong-general-short`"
    assert float(rows["`luong-dot`"][4].split()[0]) == pytest.approx(ours - theirs, abs=0.05)
    assert "Further" not in changes_table(result)["changes"]


def test_systems_that_differ_in_several_things_are_compared_below_the_table(
    make_run: MakeRun, collected: Callable[..., Result]
) -> None:
    make_run("hard-reinforce-1", BAD)
    make_run("hard-marginal-1", GOOD)
    text = changes_table(collected())["changes"]
    assert "Further differences: `hard-marginal` minus `hard-reinforce` " in text
    assert "luong" not in text.partition("Further")[2]


def test_every_system_with_one_change_has_a_baseline_trained_as_long() -> None:
    short = {name for name, planned in PLAN.items() if name in TRANSLATING and planned.epochs == 12}
    assert short | {"hard-marginal"} == CONTROLS.keys() == set(TRANSLATING) - TEXTS.keys()
    alone = {name for name, (control, _) in CONTROLS.items() if control is None}
    assert alone == {"fixed-context-short", "post-norm-short", "hard-marginal"}
    assert {control for control, _ in CONTROLS.values() if control} <= short


def test_the_table_of_lengths_has_the_gain_from_attention(make_run: MakeRun, collected: Callable[[], Result]) -> None:
    make_run("bahdanau-1", GOOD)
    without = collect.tables(collected())["lengths"]
    assert "minus" not in without
    make_run("fixed-context-1", BAD)
    result = collected()
    rows = lines_of(collect.tables(result)["lengths"])
    bucket = caption_buckets(result)[1]
    gap = bucket.bleu["bahdanau"].value - bucket.bleu["fixed-context"].value
    assert rows["9 to 10"][-1].startswith(f"{gap:.1f} ")
