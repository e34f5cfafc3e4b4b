from pathlib import Path

import pytest

from bench.libraries.contender import Setup, Task, running_contenders
from bench.libraries.section import compare, setups_of
from bench.models import Models, Subject
from bench.options import Options


@pytest.fixture(scope="module")
def models(bundle: Path, toy_sentences: list[str], tmp_path_factory: pytest.TempPathFactory) -> Models:
    scratch = tmp_path_factory.mktemp("models")
    return Models(scratch, bundle, toy_sentences)


def float32_setups(subject: Subject) -> list[Setup]:
    return [one for one in setups_of(subject, max_rows=5) if one.dtype == "float32" and not one.environment]


def test_all_libraries_decode_the_same_and_their_speeds_are_compared(models: Models, toy_sentences: list[str]) -> None:
    options = Options(models, toy_sentences, rounds=1, max_rows=1, seconds=1, requests=1, threads=1)
    result = compare(options, models.tiny, float32_setups(models.tiny), new_tokens=None)
    names = ["sightline float32", "ctranslate2 float32", "transformers float32"]
    assert [(row["decoding"], row["rows"], row["contender"], row["equal"]) for row in result.rows] == [
        (decoding, 1, name, 1) for decoding in ("greedy", "beam 5") for name in names
    ]
    first, second, _ = (row["tokens_per_s"] for row in result.rows[:3])
    assert result.figures["library.tiny.greedy.1.float32"].value == pytest.approx(first / second, rel=0.01)


def test_outputs_have_the_requested_length(models: Models, toy_sentences: list[str]) -> None:
    tasks = [
        Task(models.tiny.sources(toy_sentences[:3]), num_beams, new_tokens=7, at_least_s=0) for num_beams in (1, 5)
    ]
    with running_contenders(float32_setups(models.tiny), num_threads=1) as contenders:
        results = [contender.measure(task) for contender in contenders for task in tasks]
    assert [[len(output) for output in result.outputs] for result in results] == [[7, 7, 7]] * 6


def test_a_setup_that_the_processor_does_not_support_is_skipped(
    models: Models, capfd: pytest.CaptureFixture[str]
) -> None:
    unknown, ours = (
        Setup("ctranslate2", "int8", models.tiny.ctranslate2, ["--compute-type", "int8"], {"CT2_FORCE_CPU_ISA": "X"}),
        Setup("sightline", "float32", models.tiny.bundles["float32"]),
    )
    with running_contenders([unknown, ours], num_threads=1) as contenders:
        assert [contender.setup for contender in contenders] == [ours]
    assert "skipped: ctranslate2 int8 X" in capfd.readouterr().out
