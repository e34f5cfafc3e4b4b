"""Verification: compare the graphs of a bundle in ONNX Runtime with their PyTorch model."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from export.check.forced import ForcedPass, forced_pass
from export.check.sessions import Array, Sessions, encode, onnx_steps, read_sources, run_step, token_cosines
from export.errors import VerificationError as VerificationError
from model.architectures.causal import CausalModel
from model.architectures.classifier import Classifier
from model.architectures.factory import Model, TranslationModel
from model.data.batches import pad
from model.data.text import numbered_sentences
from model.decoding.reference import greedy, one_thread, pytorch_steps
from model.rounding import Reference, reference
from service.bundle import Manifest, Verification

PERTURBED_PAIRS = 2  # pairs of perturbed models, see `model.rounding`; few are enough, because a batch has many values
BATCH_ROWS = 16
MAX_NEW_TOKENS = 80
COMPARED_TOKENS = 64
SPARE_POSITIONS = 3  # the caches of the service are longer than its sequences

Generator = TranslationModel | CausalModel  # models that generate text

# Fields of `Differences` that have limits, with their names in messages.
COMPARED = {
    "hidden": "hidden",
    "logits": "logits",
    "attention": "attention maps",
    "states": "states",
    "cosines": "cosines of tokens",
}


@dataclass(frozen=True)
class Differences:
    """Largest absolute differences, and numbers of different generations."""

    hidden: float = 0.0
    logits: float = 0.0  # also log-probabilities of tokens and labels
    attention: float = 0.0
    generations: int = 0  # that rounding does not explain
    close_generations: int = 0  # that differ first where the two best candidates are close
    cosines: float = 0.0  # cosines of token embeddings
    states: float = 0.0  # states after a step

    def merged(self, other: "Differences") -> "Differences":
        return Differences(
            # NumPy's maximum keeps NaN, which Python's may lose.
            float(np.maximum(self.hidden, other.hidden)),
            float(np.maximum(self.logits, other.logits)),
            float(np.maximum(self.attention, other.attention)),
            self.generations + other.generations,
            self.close_generations + other.close_generations,
            float(np.maximum(self.cosines, other.cosines)),
            float(np.maximum(self.states, other.states)),
        )


@dataclass(frozen=True)
class Compared:
    """Differences in one batch, and the largest differences that rounding explains, by field."""

    found: Differences
    limits: Mapping[str, float]


def read_sentences(path: Path) -> list[str]:
    """Read a file with one sentence per line, without blank lines.

    Raises:
        ValueError: the file has no sentence or is not UTF-8.
    """
    return list(numbered_sentences(path).values())


def verify(
    sessions: Sessions, model: Model, tokenizer: Tokenizer, sentences: Sequence[str], tolerance: float | None = None
) -> Verification:
    """Compare all outputs of a bundle, and whole greedy generations, with its PyTorch model.

    The reference is the model in float64. The largest allowed difference is derived for each batch
    by `model.rounding`, so that the limits hold on every processor.

    Args:
        sessions: the bundle.
        model: the model from which the bundle was exported, in evaluation mode.
        tokenizer: tokenizer of the sources.
        sentences: source sentences.
        tolerance: the largest allowed difference, in place of the derived limits.

    Returns:
        The record for the manifest.

    Raises:
        VerificationError: a difference exceeds its limit or is not a number, or a generation
            differs.
        ValueError: a sentence has more tokens than the model reads, or the tolerance is negative or
            not a number.
    """
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"tolerance must be a number of at least 0, got {tolerance}")
    limit = sessions.manifest.limits.max_source_tokens
    sources = [encoding.ids for encoding in tokenizer.encode_batch(list(sentences))]
    for number, source in enumerate(sources, start=1):
        if len(source) > limit:
            raise ValueError(f"sentence {number} has {len(source)} tokens, but the model reads at most {limit}")
    models = reference(model, PERTURBED_PAIRS)
    compared = list[Compared]()
    with one_thread():
        for start in range(0, len(sources), BATCH_ROWS):
            batch = sources[start : start + BATCH_ROWS]
            if isinstance(model, Classifier):
                compared.append(_compare_labels(sessions, cast(Reference[Classifier], models), batch))
            else:
                compared.append(_compare_batch(sessions, cast(Reference[Generator], models), batch))
        if sessions.similar is not None:
            compared.append(_compare_tokens(sessions, models))
    if tolerance is not None:
        compared = [Compared(one.found, dict.fromkeys(COMPARED, tolerance)) for one in compared]
    _raise_if_exceeded(compared)
    found = reduce(Differences.merged, (one.found for one in compared))
    return Verification(
        sentences=len(sentences),
        tolerance=max(one.limits.get("logits", 0.0) for one in compared),
        max_logit_difference=found.logits,
        max_attention_difference=found.attention,
        different_generations=found.generations,
        close_generations=found.close_generations,
    )


def _raise_if_exceeded(compared: Sequence[Compared]) -> None:
    failures = []
    for field, words in COMPARED.items():
        pairs = [(getattr(one.found, field), one.limits.get(field, 0.0)) for one in compared]
        exceeded = [pair for pair in pairs if not pair[0] <= pair[1]]  # so that NaN exceeds
        if exceeded:
            difference, limit = max(exceeded, key=lambda pair: (math.isnan(pair[0]), pair[0]))
            failures.append(f"{words} differ by {difference:.3g}, but the limit is {limit:.3g}")
    generations = sum(one.found.generations for one in compared)
    if generations:
        failures.append(f"{generations} greedy generations differ")
    if failures:
        raise VerificationError(f"ONNX Runtime and PyTorch differ: {'; '.join(failures)}")


@torch.inference_mode()
def _compare_labels(sessions: Sessions, models: Reference[Classifier], sources: Sequence[Sequence[int]]) -> Compared:
    padded = pad(sources, models.exact.config.pad_id)
    lengths = torch.tensor([len(source) for source in sources])
    is_own = _token_mask(sources)[:, :, None]  # (B, S, 1)

    def compute(model: Classifier) -> dict[str, Array]:
        hidden, maps = model.encode(padded, lengths, need_weights=True)
        assert maps is not None
        labels = model(padded, lengths)
        return {"hidden": hidden.numpy() * is_own, "logits": labels.numpy(), "attention": maps.numpy()}

    expected, limits = models.limits(compute)
    encoded = encode(sessions, sources)
    found = Differences(
        hidden=_largest([encoded["hidden"] * is_own - expected["hidden"]]),
        logits=_largest([encoded["label_logprobs"] - expected["logits"]]),
        attention=_encoder_map_difference(sessions.manifest, encoded, {"encoder": torch.tensor(expected["attention"])}),
    )
    return Compared(found, limits)


@torch.inference_mode()
def _compare_tokens(sessions: Sessions, models: Reference[Any]) -> Compared:
    """Compare the cosines of evenly spaced token ids with all tokens."""
    ids = np.linspace(0, len(models.exact.embedding.weight) - 1, COMPARED_TOKENS, dtype=np.int64)

    def compute(model: Model) -> dict[str, Array]:
        units = torch.nn.functional.normalize(model.embedding.weight)  # (V, M)
        return {"cosines": (units[ids] @ units.T).numpy()}

    expected, limits = models.limits(compute)
    found = _largest([token_cosines(sessions, ids) - expected["cosines"]])
    return Compared(Differences(cosines=found), limits)


def _compare_batch(sessions: Sessions, models: Reference[Generator], sources: Sequence[Sequence[int]]) -> Compared:
    manifest, end_ids = sessions.manifest, sessions.manifest.tokens.end_ids
    generations, close_generations, targets = 0, 0, []
    for source in sources:
        first_id = manifest.decoder_prompt_ids(source)[-1]
        max_new_tokens = min(MAX_NEW_TOKENS, manifest.max_new_tokens_for(len(source)))
        expected = greedy(pytorch_steps(models.exact, source), first_id, end_ids, max_new_tokens).ids
        given = greedy(onnx_steps(sessions, source), first_id, end_ids, max_new_tokens).ids
        if given != expected:
            is_close = _differ_where_close(models, source, first_id, expected, given)
            generations, close_generations = generations + (not is_close), close_generations + is_close
        targets.append([first_id, *expected[:-1]])
    compared = _compare_forced(sessions, models, sources, targets)
    found = replace(compared.found, generations=generations, close_generations=close_generations)
    return replace(compared, found=found)


@torch.inference_mode()
def _differ_where_close(
    models: Reference[Generator], source: Sequence[int], first_id: int, expected: Sequence[int], given: Sequence[int]
) -> bool:
    """Return True if rounding explains the first token in which two generations differ.

    Rounding may increase the logit of one candidate and decrease that of the other, each by at most
    its limit.
    """
    same = next(index for index, pair in enumerate(zip(expected, given, strict=False)) if pair[0] != pair[1])
    read = [first_id, *expected[:same]]

    def compute(model: Generator) -> dict[str, Array]:
        return {"logits": forced_pass(model, [source], [read]).logits[0, -1].numpy()}

    exact, limits = models.limits(compute)
    row = exact["logits"]
    return bool(row.max() - row[given[same]] <= 2 * limits["logits"])


@torch.inference_mode()
def _compare_forced(
    sessions: Sessions,
    models: Reference[Generator],
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
) -> Compared:
    """Compare teacher-forced decoding.

    PyTorch runs one pass. ONNX Runtime runs steps, with rows that start at different times.

    Each step of a recurrent decoder starts from the states of PyTorch. A trained decoder can
    amplify rounding errors from step to step, so that after some sixty steps even float32 and
    float64 in PyTorch differ too much for a comparison.
    """
    manifest, source_lengths = sessions.manifest, [len(source) for source in sources]
    expected = forced_pass(models.exact, sources, targets)
    carried = {
        name: states.float().double() for name, states in expected.states.items()
    }  # rounded to float32, like the inputs of the graph
    if carried:
        expected = forced_pass(models.exact, sources, targets, carried)

    def compute(model: Generator) -> dict[str, Array]:
        return _values(forced_pass(model, sources, targets, carried), sources, targets)

    logits = expected.logits.numpy()
    num_prefilled = [len(manifest.decoder_prompt_ids(source)) - 1 for source in sources]
    longest = max(filled + len(read) for filled, read in zip(num_prefilled, targets, strict=True))
    encoded, first = read_sources(sessions, sources, min(longest + SPARE_POSITIONS, manifest.limits.max_target_tokens))
    is_own = _token_mask(sources)[:, :, None]
    found = Differences(
        hidden=_largest([np.where(is_own, encoded["hidden"] - expected.hidden.numpy(), 0.0)]),
        attention=_encoder_map_difference(manifest, encoded, expected.maps),
    )
    states = {name: array.copy() for name, array in first.items()}
    before = {name: array.numpy() for name, array in carried.items() if name in states}
    after = {name: expected.states[name].numpy() for name in before}
    found = found.merged(Differences(states=_largest(first[name] - array[:, 0] for name, array in after.items())))
    outputs = _outputs_to_compare(manifest)
    for tick in range(max(row + len(read) for row, read in enumerate(targets))):
        # Row i starts i ticks late, from its initial states. After its last token, it repeats that
        # token.
        for row in range(tick, len(targets)):
            for name, array in states.items():
                array[row] = first[name][row]
        ages = [min(max(tick - row, 0), len(read) - 1) for row, read in enumerate(targets)]
        tokens = [read[age] for age, read in zip(ages, targets, strict=True)]
        lengths = [filled + age for filled, age in zip(num_prefilled, ages, strict=True)]
        for name, array in before.items():
            states[name][:] = array[range(len(targets)), ages]
        given = run_step(sessions, states, tokens, lengths, source_lengths, outputs)
        running = np.array([row for row, read in enumerate(targets) if row <= tick < row + len(read)])
        if not len(running):
            continue
        given = {name: array[running] for name, array in given.items()}
        indices = running, np.array(ages)[running]
        state_differences = [states[name][running] - array[running, indices[1] + 1] for name, array in after.items()]
        own = {"decoder": np.array(lengths)[running] + 1, "cross": np.array(source_lengths)[running]}
        found = found.merged(
            Differences(
                logits=_score_difference(given, logits[indices]),
                attention=_step_map_difference(manifest, given, expected.maps, indices, own),
                states=_largest(state_differences),
            )
        )
    _, limits = models.limits(compute)
    return Compared(found, limits)


def _token_mask(sources: Sequence[Sequence[int]]) -> Array:
    """Return a mask (B, S) that is True for tokens and False for padding."""
    lengths = np.array([len(source) for source in sources])
    return np.arange(lengths.max()) < lengths[:, None]


def _values(given: ForcedPass, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> dict[str, Array]:
    """Return the compared values of a pass without padding, by field of `Differences`."""
    parts: dict[str, list[Tensor]] = {name: [] for name in ("hidden", "logits", "attention", "states")}
    for row, (source, read) in enumerate(zip(sources, targets, strict=True)):
        logits = given.logits[row, : len(read)]
        parts["hidden"].append(given.hidden[row, : len(source)])
        parts["logits"] += [logits, logits.log_softmax(dim=-1)]
        rows = {"decoder": len(read), "cross": len(read)}
        parts["attention"] += [
            maps[:, row, :, : rows.get(kind)] for kind, maps in given.maps.items() if maps is not None
        ]
        parts["states"] += [states[row, : len(read) + 1] for states in given.states.values()]
    return {
        name: torch.cat([one.flatten() for one in arrays]).numpy() if arrays else np.empty(0)
        for name, arrays in parts.items()
    }


def _outputs_to_compare(manifest: Manifest) -> list[str]:
    states = {state.output for state in manifest.states}
    return [name for name in manifest.decoder_graph.outputs if name not in states]


def _score_difference(given: Mapping[str, Array], logits: Array) -> float:
    """Return the largest difference of logits (B, V) and of all log-probabilities."""
    logprobs = torch.from_numpy(logits).log_softmax(dim=-1).numpy()
    top = np.sort(logprobs, axis=-1)[:, : -given["top_ids"].shape[1] - 1 : -1]  # (B, K)
    return _largest(
        [
            given["logits"] - logits,
            given["logprobs"] - logprobs,
            given["top_logprobs"] - top,
            given["top_logprobs"] - np.take_along_axis(given["logprobs"], given["top_ids"], axis=-1),
        ]
    )


def _step_map_difference(
    manifest: Manifest,
    given: Mapping[str, Array],
    maps: Mapping[str, Tensor | None],
    indices: tuple[Array, Array],
    own_columns: Mapping[str, Array],
) -> float:
    """Return the largest difference of the attention weights of a decoder step.

    Columns beyond the length of a row are ignored, because their values are undefined.

    Args:
        manifest: manifest of the bundle.
        given: outputs of the step, for the running rows.
        maps: attention weights of PyTorch (L, B, H, T, columns), by kind.
        indices: the running rows, and the number of the step that each is at.
        own_columns: number of defined columns of each running row, by kind.
    """
    rows, ages = indices
    largest = 0.0
    for kind, own in own_columns.items():
        expected = maps[kind]
        if expected is None:
            continue
        (name,) = manifest.attention_of(kind).outputs
        at_ages = expected.numpy().swapaxes(2, 3)[:, rows, ages].transpose(1, 2, 0, 3)  # (B, H, L, columns)
        columns = min(at_ages.shape[3], given[name].shape[3])
        is_own = np.arange(columns) < own[:, None, None, None]
        difference = np.where(is_own, given[name][..., :columns] - at_ages[..., :columns], 0.0)
        largest = float(np.maximum(largest, _largest([difference])))
    return largest


def _encoder_map_difference(manifest: Manifest, given: Mapping[str, Array], maps: Mapping[str, Tensor | None]) -> float:
    """Return the largest difference of the attention weights of the encoder (L, B, H, S, columns).

    Columns of padding are compared too: they must be 0, as in PyTorch.
    """
    largest = 0.0
    for kind in ("encoder", "encoder_slots"):
        expected = maps.get(kind)
        if expected is None:
            continue
        names = manifest.attention_of(kind).outputs
        difference = _largest(given[name] - layer for name, layer in zip(names, expected.numpy(), strict=True))
        largest = float(np.maximum(largest, difference))
    return largest


def _largest(differences: Iterable[Array]) -> float:
    """Return the largest absolute value; NaN if there is one, and 0 without values."""
    return float(np.max([np.abs(difference).max() for difference in differences], initial=0))
