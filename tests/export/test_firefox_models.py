"""Firefox translation models compute what a slow reference computes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sightline.base.bundle import State
from sightline.export.check.sessions import Sessions, onnx_steps
from sightline.export.check.verify import ComparedTexts, reference_outputs
from sightline.export.families import firefox
from sightline.export.families.description import Description
from sightline.export.families.weights import Weights
from sightline.export.sources.firefox.marian_binary import MarianModel
from tests.export.firefox.models import random_tensors, write_marian
from tests.export.firefox.reference import FirefoxReference
from tests.export.imported import load, run_rows
from tests.support.reference_decoding import LogitsProcessors, greedy
from tests.support.tensors import tensors_of
from tests.zoo.comparing import MAP_TOLERANCE, TOLERANCE

Floats = NDArray[np.float32]
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


def import_student(settings: Mapping[str, Any], arrays: Mapping[str, Floats], folder: Path) -> Sessions:
    """Build the graphs of a model, and check that each of its tensors was used."""
    tensors = tensors_of(arrays)
    sessions = load(*firefox.describe(settings, tensors, "model.bin"), folder)
    tensors.check_all_read()
    return sessions


@dataclass(frozen=True)
class Student:
    """A random model, its slow reference and its graphs."""

    expected: FirefoxReference
    model: Description
    weights: Weights
    sessions: Sessions

    def decode(self, source: Sequence[int], target: Sequence[int]) -> tuple[Any, Any]:
        """Return the logits (T + 1, V) and cross-attention (L, H, T + 1, S) of the reference."""
        logits, maps = zip(*self.expected.steps(source, [None, *target]), strict=True)
        return np.stack(logits), np.stack(maps, axis=2)


def make_student(settings: Mapping[str, Any], arrays: Mapping[str, Floats], folder: Path) -> Student:
    tensors = tensors_of(arrays)
    model, weights = firefox.describe(settings, tensors, "model.bin")
    expected = FirefoxReference(MarianModel(write_marian(arrays), "model.bin"))
    return Student(expected, model, weights, import_student(settings, arrays, folder))


@pytest.fixture(scope="module", params=[True, False], ids=["one vocabulary", "two vocabularies"])
def student(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Student:
    settings = SETTINGS
    if not request.param:
        settings = SETTINGS | {"dim-vocabs": [SOURCE_VOCABULARY, TARGET_VOCABULARY], "tied-embeddings-all": False}
    return make_student(
        settings, random_tensors(separate=not request.param, **SIZES), tmp_path_factory.mktemp("student")
    )


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


def test_the_reference_of_verification_agrees(student: Student) -> None:
    targets = [[START, *target] for target in TARGETS]
    runs, _ = run_rows(student.sessions, SOURCES, targets)
    for run, source, target in zip(runs, SOURCES, targets, strict=True):
        texts = ComparedTexts((tuple(source),), (tuple(target),))
        found = reference_outputs(student.model, student.weights, texts)
        np.testing.assert_allclose(run.encoder, found["encoder.0"], rtol=0, atol=MAP_TOLERANCE)
        logits = student.decode(source, target[1:])[0]
        np.testing.assert_allclose(found["logits.0"][:, :-1], logits, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(run.cross, found["cross.0"], rtol=0, atol=MAP_TOLERANCE)


def test_greedy_outputs_equal_those_of_the_reference(student: Student) -> None:
    allowed = [token for token in range(TARGET_VOCABULARY) if token != 1]
    processors = LogitsProcessors(suppress_tokens=(1, START))
    for source in SOURCES[:2]:
        found = greedy(onnx_steps(student.sessions, source), START, firefox.END_ID, 12, processors=processors)
        # The reference counts an end token that it does not return.
        expected = student.expected.translate(source, 13, allowed).ids
        assert [token for token in found.ids if token != firefox.END_ID] == expected


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
