"""Compares a bundle's graphs in ONNX Runtime with the PyTorch model that they were made from."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from export.forced import forced_pass
from export.sessions import Array, Sessions, compare_tokens, encode, initial_states, onnx_steps, run_step
from model.causal import CausalModel
from model.classifier import Classifier
from model.data import pad, read_lines
from model.factory import Model, TranslationModel
from model.reference import NextLogits, greedy, one_thread, pytorch_steps
from service.bundle import Manifest, Verification

# Three times what the 300 sentences of this repository show, in float32, of the most sensitive system: that is
# `multiplicative`, whose scores are not scaled and reach 173. Most show 1e-5 to 4e-5, for logits of 13.
TOLERANCE = 3e-4
CLOSE = 1e-4  # logits of two candidates nearer than this may change places by rounding
BATCH_ROWS = 16
MAX_NEW_TOKENS = 80
COMPARED_TOKENS = 64
SPARE_SLOTS = 3  # a service's buffers are longer than its rows


class VerificationError(Exception):
    """A bundle differs from what it was made from by more than was allowed; the message says where."""


@dataclass(frozen=True)
class Differences:
    """The largest absolute differences found, and generations that are not the same."""

    hidden: float = 0.0
    logits: float = 0.0  # and what is derived from them; the log-probabilities of labels
    attention: float = 0.0
    generations: int = 0  # that differ though no two candidates were close
    close_generations: int = 0  # that part where the two best candidates are close
    cosines: float = 0.0  # of tokens
    states: float = 0.0  # that a step leaves to the next

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


def read_sentences(path: Path) -> list[str]:
    """Read one sentence a line; blank lines are left out.

    Raises:
        ValueError: there is none, or the file is not UTF-8.
    """
    return list(numbered_sentences(path).values())


def numbered_sentences(path: Path) -> dict[int, str]:
    """Read sentences as `read_sentences` does, each with the number of its line."""
    sentences = {number: line for number, line in enumerate(read_lines(path), start=1) if line.strip()}
    if not sentences:
        raise ValueError(f"{path} has no sentences")
    return sentences


def verify(
    sessions: Sessions, model: Model, tokenizer: Tokenizer, sentences: Sequence[str], tolerance: float = TOLERANCE
) -> Verification:
    """Compare encoder, attention maps, labels or steps and whole greedy generations, and how similar tokens are.

    Raises:
        VerificationError: a difference exceeds the tolerance or is not a number, or a generation differs.
        ValueError: a sentence has more tokens than the model reads, or the tolerance is negative or not a number.
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance is {tolerance}, it must be a number of at least 0")
    limit = sessions.manifest.limits.max_source_tokens
    sources = [encoding.ids for encoding in tokenizer.encode_batch(list(sentences))]
    for sentence, source in zip(sentences, sources, strict=True):
        if len(source) > limit:
            raise ValueError(f"a sentence has {len(source)} tokens, the model reads {limit}: {sentence[:40]!r}...")
    found = Differences()
    with one_thread():
        for start in range(0, len(sources), BATCH_ROWS):
            batch = sources[start : start + BATCH_ROWS]
            if isinstance(model, Classifier):
                found = found.merged(_compare_labels(sessions, model, batch))
            else:
                found = found.merged(_compare_batch(sessions, model, batch))
        if sessions.similar is not None:
            found = found.merged(_compare_tokens(sessions, model))
    _refuse(found, tolerance)
    return Verification(
        sentences=len(sentences),
        tolerance=tolerance,
        max_logit_difference=found.logits,
        max_attention_difference=found.attention,
        different_generations=found.generations,
        close_generations=found.close_generations,
    )


def _refuse(found: Differences, tolerance: float) -> None:
    largest = {"hidden": found.hidden, "logits": found.logits, "attention maps": found.attention}
    largest |= {"states": found.states, "cosines of tokens": found.cosines}
    failures = [
        f"{what} differ by {difference:.3g}" for what, difference in largest.items() if not difference <= tolerance
    ]
    if found.generations:
        failures.append(f"{found.generations} greedy generations differ")
    if failures:
        raise VerificationError(f"ONNX Runtime is not PyTorch (tolerance {tolerance:g}): {', '.join(failures)}")


@torch.inference_mode()
def _compare_labels(sessions: Sessions, model: Classifier, sources: Sequence[Sequence[int]]) -> Differences:
    padded, lengths = pad(sources, model.config.pad_id), torch.tensor([len(source) for source in sources])
    hidden, maps = model.encode(padded, lengths, need_weights=True)
    encoded = encode(sessions, sources)
    return Differences(
        hidden=_largest([encoded["hidden"] - hidden.numpy()]),
        logits=_largest([encoded["label_logprobs"] - model(padded, lengths).numpy()]),
        attention=_encoder_map_difference(sessions.manifest, encoded, {"encoder": maps}),
    )


def _compare_tokens(sessions: Sessions, model: Model) -> Differences:
    """Some tokens from all over the table with every token."""
    table = model.embedding.weight.detach()  # (V, M)
    ids = np.linspace(0, len(table) - 1, COMPARED_TOKENS, dtype=np.int64)
    units = torch.nn.functional.normalize(table)
    return Differences(cosines=_largest([compare_tokens(sessions, ids) - (units[ids] @ units.T).numpy()]))


def _compare_batch(
    sessions: Sessions, model: TranslationModel | CausalModel, sources: Sequence[Sequence[int]]
) -> Differences:
    manifest, end_id = sessions.manifest, sessions.manifest.tokens.end_id
    found, targets = Differences(), []
    for source in sources:
        first_id, max_new_tokens = manifest.beginning(source)[-1], min(MAX_NEW_TOKENS, manifest.room(len(source)))
        expected_steps, steps = pytorch_steps(model, source), onnx_steps(sessions, source)
        expected = greedy(expected_steps, first_id, end_id, max_new_tokens).ids
        given = greedy(steps, first_id, end_id, max_new_tokens).ids
        if given != expected:
            close = _part_where_close(expected_steps, first_id, expected, given)
            found = found.merged(Differences(generations=int(not close), close_generations=int(close)))
        targets.append([first_id, *expected[:-1]])
    return found.merged(_compare_forced(sessions, model, sources, targets))


def _part_where_close(next_logits: NextLogits, first_id: int, expected: Sequence[int], given: Sequence[int]) -> bool:
    """Whether the two best candidates are close at the first token in which two generations differ."""
    same = next(index for index, pair in enumerate(zip(expected, given, strict=False)) if pair[0] != pair[1])
    (row,) = next_logits([[first_id, *expected[:same]]])
    second, best = np.sort(row)[-2:]
    return bool(best - second < CLOSE)


@torch.inference_mode()
def _compare_forced(
    sessions: Sessions,
    model: TranslationModel | CausalModel,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
) -> Differences:
    """Read the same targets in PyTorch at once and in ONNX Runtime token by token, rows at different ages.

    What a recurrent decoder carries is PyTorch's at every step. A trained one may magnify a difference in its state
    from step to step, PyTorch's float32 from its own float64 too: sixty steps on, it would tell nothing of the graph.
    """
    manifest, source_lengths = sessions.manifest, [len(source) for source in sources]
    expected = forced_pass(model, sources, targets)
    logits = expected.logits.numpy()
    encoded = encode(sessions, sources)
    is_own = np.arange(max(source_lengths)) < np.array(source_lengths)[:, None]  # (B, S)
    found = Differences(
        hidden=_largest([np.where(is_own[:, :, None], encoded["hidden"] - expected.hidden.numpy(), 0.0)]),
        attention=_encoder_map_difference(manifest, encoded, expected.maps),
    )
    num_filled = [len(manifest.beginning(source)) - 1 for source in sources]
    longest = max(filled + len(read) for filled, read in zip(num_filled, targets, strict=True))
    first = initial_states(manifest, encoded, min(longest + SPARE_SLOTS, manifest.limits.max_target_tokens))
    states = {name: array.copy() for name, array in first.items()}
    carried = {name: array.numpy() for name, array in expected.states.items() if name in states}
    found = found.merged(Differences(states=_largest(first[name] - array[:, 0] for name, array in carried.items())))
    outputs = _outputs_to_compare(manifest)
    for tick in range(max(row + len(read) for row, read in enumerate(targets))):
        # Row i begins i ticks late, from its first states; after its own time it reads its last token again and again.
        for row in range(tick, len(targets)):
            for name, array in states.items():
                array[row] = first[name][row]
        ages = [min(max(tick - row, 0), len(read) - 1) for row, read in enumerate(targets)]
        tokens = [read[age] for age, read in zip(ages, targets, strict=True)]
        lengths = [filled + age for filled, age in zip(num_filled, ages, strict=True)]
        for name, array in carried.items():
            states[name][:] = array[range(len(targets)), ages]
        given = run_step(sessions, states, tokens, lengths, source_lengths, outputs)
        running = np.array([row for row, read in enumerate(targets) if row <= tick < row + len(read)])
        if not len(running):
            continue
        given = {name: array[running] for name, array in given.items()}
        places = running, np.array(ages)[running]
        left = [states[name][running] - array[running, places[1] + 1] for name, array in carried.items()]
        own = {"decoder": np.array(lengths)[running] + 1, "cross": np.array(source_lengths)[running]}
        found = found.merged(
            Differences(
                logits=_score_difference(given, logits[places]),
                attention=_step_map_difference(manifest, given, expected.maps, places, own),
                states=_largest(left),
            )
        )
    return found


def _outputs_to_compare(manifest: Manifest) -> list[str]:
    states = {state.output for state in manifest.states}
    return [name for name in manifest.decoder.outputs if name not in states]


def _score_difference(given: Mapping[str, Array], logits: Array) -> float:
    """Of the logits (B, V), of their log-probabilities, and of the best of these and their ids."""
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
    places: tuple[Array, Array],
    own_columns: Mapping[str, Array],
) -> float:
    """Of each row's own columns; beyond them a bundle's maps mean nothing.

    Args:
        manifest: of the bundle.
        given: the step's outputs, of the rows that run.
        maps: PyTorch's (L, B, H, T, columns), by kind.
        places: the rows that run, and which row of its map each has come to.
        own_columns: of each row that runs, by kind.
    """
    rows, ages = places
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
    """Of whole maps (L, B, H, S, columns), by kind: columns of padding are 0 in PyTorch and must be here."""
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
    """The largest absolute value, NaN where there is one; 0 of nothing."""
    return float(np.max([np.abs(difference).max() for difference in differences], initial=0))
