"""Firefox translation models compute what a slow reference computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from sightline.base.bundle import State
from sightline.export.check.sessions import Sessions
from sightline.export.families import firefox
from sightline.export.families.description import Description
from sightline.export.sources.firefox.marian_binary import MarianModel
from tests.export.firefox.models import random_tensors, write_marian
from tests.export.firefox.reference import FirefoxReference
from tests.export.imported import load, run_rows
from tests.support.tensors import tensors_of
from tests.zoo.comparing import MAP_TOLERANCE, TOLERANCE

WIDTH, HEADS, FFN = 36, 3, 23
SOURCE_VOCABULARY, TARGET_VOCABULARY = 47, 59
SIZES: dict[str, Any] = {"width": WIDTH, "inner": FFN, "vocabularies": (SOURCE_VOCABULARY, TARGET_VOCABULARY)}
SETTINGS: dict[str, Any] = {
    "type": "transformer", "dim-emb": WIDTH, "dim-vocabs": [TARGET_VOCABULARY, TARGET_VOCABULARY], "enc-depth": 2,
    "dec-depth": 1, "transformer-heads": HEADS, "transformer-dim-ffn": FFN, "transformer-ffn-activation": "relu",
    "transformer-decoder-autoreg": "rnn", "dec-cell": "ssru", "dec-cell-base-depth": 2, "tied-embeddings-all": True,
    "transformer-preprocess": "", "transformer-postprocess": "dan", "transformer-guided-alignment-layer": "last",
    "version": "v1.9.56", "right-left": False,
}  # fmt: skip


@dataclass(frozen=True)
class Student:
    """A random model, its slow reference and its graphs, which use each of its tensors."""

    expected: FirefoxReference
    model: Description
    sessions: Sessions

    def decode(self, source: Sequence[int], target: Sequence[int]) -> tuple[Any, Any]:
        """Return the logits (T + 1, V) and cross-attention (L, H, T + 1, S) of the reference."""
        logits, maps = zip(*self.expected.steps(source, [None, *target]), strict=True)
        return np.stack(logits), np.stack(maps, axis=2)


@pytest.fixture(scope="module", params=[True, False], ids=["one vocabulary", "two vocabularies"])
def student(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Student:
    settings = SETTINGS
    if not request.param:
        settings = SETTINGS | {"dim-vocabs": [SOURCE_VOCABULARY, TARGET_VOCABULARY], "tied-embeddings-all": False}
    arrays = random_tensors(separate=not request.param, **SIZES)
    tensors = tensors_of(arrays)
    model, weights = firefox.describe(settings, tensors, "model.bin")
    sessions = load(model, weights, tmp_path_factory.mktemp("student"))
    tensors.check_all_read()
    return Student(FirefoxReference(MarianModel(write_marian(arrays), "model.bin")), model, sessions)


SOURCES = [[5, 6, 7, 8, 9, 10, 11, 0], [12, 0], [0], list(range(1, 40))]
TARGETS = [[3, 4, 5], [6], [], list(range(20, 50))]
START = TARGET_VOCABULARY


def test_outputs_equal_those_of_the_reference(student: Student) -> None:
    """Rows of different ages in one batch have the outputs of each alone, bit for bit."""
    targets = [[START, *target] for target in TARGETS]
    runs, _ = run_rows(student.sessions, SOURCES, targets)
    for run, source, target in zip(runs, SOURCES, targets, strict=True):
        logits, cross = student.decode(source, target[1:])
        np.testing.assert_allclose(run.hidden, student.expected.encode(source), rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(run.logits[:, :-1], logits, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(run.cross, cross, rtol=0, atol=MAP_TOLERANCE)
        assert run.decoder is None
        (alone,), _ = run_rows(student.sessions, [source], [target])
        for name in ("hidden", "logits", "encoder", "cross"):
            np.testing.assert_array_equal(getattr(run, name), getattr(alone, name), err_msg=name)


def test_start_token_has_no_probability(student: Student) -> None:
    """Log-probabilities of other tokens are those of a vocabulary without it."""
    (run,), _ = run_rows(student.sessions, SOURCES[:1], [[START]])
    assert np.exp(run.logits[0, START] - run.logits[0, :START].max()) == 0


def test_states_of_recurrent_units_have_a_fixed_size(student: Student) -> None:
    (cell,) = [state for state in student.sessions.manifest.states if state.init == "zeros"]
    assert cell == State(input="cell.0", output="cell_out.0", init="zeros", shape=(1, WIDTH))


@pytest.mark.parametrize(("option", "layer"), [("last", 3), (2, 1), (None, 3)])
def test_guided_alignment_is_the_first_head_of_a_layer(option: Any, layer: int) -> None:
    arrays = random_tensors(**SIZES)
    first = {name: array for name, array in arrays.items() if name.startswith("decoder_l1_")}
    for number in (2, 3, 4):
        arrays |= {name.replace("_l1_", f"_l{number}_"): array for name, array in first.items()}
    settings = SETTINGS | {"dec-depth": 4, "transformer-guided-alignment-layer": option}
    if option is None:
        del settings["transformer-guided-alignment-layer"]
    model, _ = firefox.describe(settings, tensors_of(arrays), "model.bin")
    assert model.guided_alignment == ("writes", layer, 0)


def test_start_token_is_added_to_the_vocabulary(student: Student) -> None:
    generation = firefox.generation(student.model)
    assert (generation.start_ids, generation.end_ids) == ((START,), (0,))
    assert generation.defaults.suppress_tokens == (1, START)
