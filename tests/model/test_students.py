"""Students of a teacher, with recurrent units and a guided head, from the command to a bundle."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from sightline.__main__ import main
from sightline.base.bundle_files import read_manifest
from sightline.model.evaluation import bleu

TEACHER = "bundles/multi30k-en-de"
PLACES = ("on the beach", "in a park", "near a tree", "at home")
SOURCES = [
    f"A {who} is {what} {where}." for who in ("dog", "man") for what in ("running", "sitting") for where in PLACES
]
LONG = "a man and " * 90 + "a dog"  # more tokens than the teacher reads
OPTIONS = ("--source", "en", "--target", "de", "--epochs", "2", "--max-length-tokens", "60", "--threads", "1")


@pytest.fixture(scope="module", autouse=True)
def short_translations() -> Iterator[None]:
    """Limit the tokens of translations, because models with so little training never end one."""
    with patch.object(bleu, "MAX_NEW_TOKENS", 8):
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    for split, texts in (("train", [*SOURCES, LONG]), ("dev", SOURCES[::3])):
        (folder / f"{split}.en").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        (folder / f"{split}.de").write_text("".join(f"Satz {index}\n" for index in range(len(texts))), encoding="utf-8")
    return folder


def train(data: Path, run: Path, *options: str) -> int:
    return main(["train", "translation", str(data), "--run", str(run), *OPTIONS, *options])


@pytest.fixture(scope="module")
def student(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "student"
    assert (
        train(data, run, "--teacher", TEACHER, "--decoder", "ssru", "--guided-alignment", "auto", "--epochs", "20") == 0
    )
    return run


def targets_of(run: Path) -> list[str]:
    pairs = [json.loads(line) for line in (run / "teacher.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [pair["source"] for pair in pairs] == [*SOURCES, LONG]
    return [pair["target"] for pair in pairs]


def test_targets_are_translations_with_beams_and_long_sources_keep_theirs(student: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "text.en", tmp_path / "text.de"
    source.write_text("".join(f"{text}\n" for text in SOURCES), encoding="utf-8")
    assert main(["translate", str(source), "--bundle", TEACHER, "--beams", "4", "--out", str(out)]) == 0
    assert targets_of(student) == [*out.read_text(encoding="utf-8").splitlines(), f"Satz {len(SOURCES)}"]


def test_translations_continue_after_a_kill_and_a_resumed_run_needs_no_teacher(
    data: Path, student: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, teacher = tmp_path / "run", tmp_path / "bundle"
    shutil.copytree(TEACHER, teacher)
    run.mkdir()
    first, *lines = (student / "teacher.txt.progress").read_bytes().splitlines(keepends=True)
    (run / "teacher.txt.progress").write_bytes(first + b'"Zeile"\n' + b"".join(lines[1:5]) + lines[5][:7])
    assert train(data, run, "--teacher", str(teacher)) == 0
    assert f"translating {len(lines) - 5} sources with {teacher}" in capsys.readouterr().err
    assert targets_of(run) == ["Zeile", *targets_of(student)[1:]]
    shutil.rmtree(teacher)
    assert train(data, run, "--teacher", str(teacher), "--epochs", "3") == 0


def test_an_exported_student_has_recurrent_units_and_its_guided_head(student: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    assert main(["export", str(student), "--out", str(out), "--sentences", str(data / "dev.en")]) == 0
    manifest = read_manifest(out)
    assert {state.input.partition(".")[0] for state in manifest.states} == {"cell", "cross_key", "cross_value"}
    found = manifest.alignment
    assert found is not None
    assert (found.criterion, found.step, found.layer, found.heads) == ("guided", "reads", 0, (0,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--teacher", "bundles/smalltalk-chat-gatt"],
            "smalltalk-chat-gatt cannot translate, because it is no encoder",
        ),
        (["--teacher", "no/bundle"], "--teacher: "),
        (["--teacher", TEACHER, "--target", "fr"], f"{TEACHER} translates en to de, but the data are en to fr; use"),
        (["--teacher", TEACHER, "--guided-alignment", "x.align"], "x.align aligns the targets of the data, which"),
        (["--guided-alignment", "x.align"], "x.align is no file; use --guided-alignment auto"),
        (["--from", "RUN", "--decoder", "ssru"], "--decoder cannot be combined with --from, which determines it"),
    ],
)
def test_options_that_can_never_work_are_errors(
    options: Sequence[str], message: str, data: Path, student: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    for path in data.iterdir():
        shutil.copy(path, tmp_path / "data" / path.name.replace(".de", ".fr" if "fr" in options else ".de"))
    assert (
        train(tmp_path / "data", tmp_path / "run", *(str(student) if word == "RUN" else word for word in options)) == 2
    )
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_links_beside_the_data_guide_a_head_until_its_weights_are_trained_otherwise(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    links, states = data / "train.align", []
    links.write_text("0-0 1-1\n" * (len(SOURCES) + 1), encoding="utf-8")
    for run, options in (("run", ["--guided-alignment", "auto"]), ("other", ["--from", str(tmp_path / "run")])):
        assert train(data, tmp_path / run, *options) == 0
        states.append(json.loads((tmp_path / run / "averaged" / "config.json").read_text())["guided_alignment"])
    assert states == [True, False]
    assert f"{links}: 16 pairs have links of words, separated by whitespace" in capsys.readouterr().err
    links.unlink()
