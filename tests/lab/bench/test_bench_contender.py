from collections.abc import Iterator

import pytest

from lab.bench.libraries import section
from lab.bench.libraries.section import Contender, Setup, Task, running_contenders
from lab.bench.models import Subject


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
