import contextlib
from collections.abc import Iterator

import pytest

from lab.bench.libraries import section
from lab.bench.libraries.contender import Contender, Setup, Task, running_contenders
from lab.bench.models import Subject
from lab.bench.options import Options


@pytest.fixture(scope="module")
def contenders(marian: Subject) -> Iterator[list[Contender]]:
    """Every library in float32."""
    setups = section.setups_of(marian, max_rows=15)
    chosen = [one for one in setups if one.dtype == "float32" and not one.environment]
    with running_contenders(chosen, num_threads=1) as running:
        yield running


def test_all_libraries_decode_the_same_tokens(
    contenders: list[Contender], marian: Subject, toy_sentences: list[str]
) -> None:
    tasks = [Task(marian.sources(toy_sentences[:3]), beams, new_tokens=7, at_least_s=0) for beams in (1, 5)]
    ours, *others = ([contender.measure(task).outputs for task in tasks] for contender in contenders)
    assert len(others) == 2
    assert [[len(output) for output in outputs] for outputs in ours] == [[7, 7, 7]] * 2
    assert others == [ours] * 2


def test_the_speeds_of_all_libraries_are_compared(
    contenders: list[Contender], marian: Subject, short: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(section, "running_contenders", lambda *_: contextlib.nullcontext(contenders))
    result = section.compare(short, marian, [])
    kinds = ["sightline", "ctranslate2", "transformers"]
    rows = {row["library"]: row["greedy, 1"] for row in result.rows}
    assert [f"{kind}, float32" in rows for kind in kinds] == [True] * 3
    ours, theirs = (rows[f"{kind}, float32"][0] for kind in kinds[:2])
    assert result.figures["library.greedy.1.float32"].value == pytest.approx(ours / theirs, rel=0.01)
    assert section.FIXED_TOKENS == 20


def test_a_setup_that_the_processor_does_not_support_is_skipped(
    marian: Subject, capfd: pytest.CaptureFixture[str]
) -> None:
    unknown, ours = (
        Setup(
            "ctranslate2", "int8", marian.path("ctranslate2"), ["--compute-type", "int8"], {"CT2_FORCE_CPU_ISA": "X"}
        ),
        Setup("sightline", "float32", marian.bundle("float32")),
    )
    with running_contenders([unknown, ours], num_threads=1) as contenders:
        assert [contender.setup for contender in contenders] == [ours]
    assert "skipped: ctranslate2 int8 X" in capfd.readouterr().out
