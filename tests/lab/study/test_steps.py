"""Each step measures toy models, and its result gives tables and pictures."""

from pathlib import Path

import pytest

from lab.bench.record import read_results
from lab.study import context, layers, linformer, pairs, speed, vanishing
from lab.study.__main__ import STEPS, main, write_report
from lab.zoo import derived
from lab.zoo.systems import MULTI30K
from tests.support.tables import read_table

WORDS = read_table(__file__)
PICTURES = {
    "collect": ["length.svg"],
    "claims": ["long.svg"],
    "sentence": ["one-sentence-encoders.svg", "one-sentence-transformers.svg"],
    "heads": ["heads.svg", "singular-values.svg"],
    "pronouns": ["pronouns.svg"],
    "alignment": ["alignment.svg"],
    "linformer": ["linformer.svg"],
    "recall": ["recall.svg"],
    "ghost-attention": ["ghost-attention.svg"],
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (context, "SENTENCES", 2),
        (derived, "LABELS", ("bad", "fair", "good")),  # of the toy classifier
        (layers, "MODELS", (MULTI30K.name,)),
        (layers, "PARTS", {name: layers.PARTS[name] for name in ("encoder layer", "cross-attention")}),
        (linformer, "AT_LEAST_S", 0.0),
        (pairs, "TARGETS", ("de", "fr")),
        (speed, "DECODING_ROUNDS", 1),
        (speed, "DECODING_S", 0.02),
        (vanishing, "SENTENCES", 1),
    ):
        monkeypatch.setattr(module, name, value)


def test_every_step_has_a_name_of_its_own_and_is_tested() -> None:
    assert [step.NAME for step in STEPS] == list(WORDS)


@pytest.mark.parametrize("name", WORDS)
def test_a_step_measures_and_its_result_is_written_up(name: str, world: Path, tmp_path: Path) -> None:
    words = [str(world / word) if (world / word).exists() else word for word in WORDS[name].split()]
    assert main(["--results", str(tmp_path), name, *words, "--allow-dirty"]) == 0
    recorded = read_results(tmp_path)[name]
    assert recorded.command.startswith("python -m lab.study") and recorded.machine["cores"] >= 1
    assert recorded.result.rows
    (step,) = (step for step in STEPS if name == step.NAME)
    assert all(step.tables(recorded.result).values())
    write_report(tmp_path, [], tmp_path / "pictures")
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == PICTURES.get(name, [])
