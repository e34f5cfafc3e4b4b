"""Compares a bundle's graphs in ONNX Runtime with the PyTorch model that they were made from."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from export.sessions import Array, Sessions, encode, initial_states, onnx_steps, run_step
from model.reference import NextLogits, greedy, one_thread, pytorch_steps
from model.transformer import AttentionMaps, Transformer
from service.bundle import Manifest, Verification

# Three times what the 300 sentences of this repository show for logits as large as 20 in float32; maps differ by 2e-6.
TOLERANCE = 1e-4
CLOSE = 1e-4  # logits of two candidates nearer than this may change places by rounding
BATCH_ROWS = 16
MAX_NEW_TOKENS = 80
SPARE_SLOTS = 3  # a service's buffers are longer than its rows


class VerificationError(Exception):
    """A bundle differs from what it was made from by more than was allowed; the message says where."""


@dataclass(frozen=True)
class Differences:
    """The largest absolute differences found, and generations that are not the same."""

    hidden: float = 0.0
    logits: float = 0.0  # and what the step derives from them
    attention: float = 0.0
    generations: int = 0  # that differ though no two candidates were close
    close_generations: int = 0  # that part where the two best candidates are close

    def merged(self, other: "Differences") -> "Differences":
        return Differences(
            # NumPy's maximum keeps NaN, which Python's may lose.
            float(np.maximum(self.hidden, other.hidden)),
            float(np.maximum(self.logits, other.logits)),
            float(np.maximum(self.attention, other.attention)),
            self.generations + other.generations,
            self.close_generations + other.close_generations,
        )


def read_sentences(path: Path) -> list[str]:
    """One sentence a line; blank lines are left out.

    Raises:
        ValueError: there is none.
    """
    sentences = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    if not sentences:
        raise ValueError(f"{path} has no sentences")
    return sentences


def verify(
    sessions: Sessions, model: Transformer, tokenizer: Tokenizer, sentences: Sequence[str], tolerance: float = TOLERANCE
) -> Verification:
    """Compare encoder, steps, attention maps and whole greedy generations.

    Raises:
        VerificationError: a difference exceeds the tolerance or is not a number, or a generation differs.
        ValueError: a sentence has more tokens than the model reads.
    """
    limit = sessions.manifest.limits.max_source_tokens
    sources = [encoding.ids for encoding in tokenizer.encode_batch(list(sentences))]
    for sentence, source in zip(sentences, sources, strict=True):
        if len(source) > limit:
            raise ValueError(f"a sentence has {len(source)} tokens, the model reads {limit}: {sentence[:40]!r}...")
    found = Differences()
    with one_thread():
        for start in range(0, len(sources), BATCH_ROWS):
            found = found.merged(_compare_batch(sessions, model, sources[start : start + BATCH_ROWS]))
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
    failures = [
        f"{what} differ by {difference:.3g}" for what, difference in largest.items() if not difference <= tolerance
    ]
    if found.generations:
        failures.append(f"{found.generations} greedy generations differ")
    if failures:
        raise VerificationError(f"ONNX Runtime is not PyTorch (tolerance {tolerance:g}): {', '.join(failures)}")


def _compare_batch(sessions: Sessions, model: Transformer, sources: Sequence[Sequence[int]]) -> Differences:
    tokens, limits = sessions.manifest.tokens, sessions.manifest.limits
    max_new_tokens = min(MAX_NEW_TOKENS, limits.max_target_tokens)
    found, targets = Differences(), []
    for source in sources:
        expected_steps, steps = pytorch_steps(model, source), onnx_steps(sessions, source)
        expected = greedy(expected_steps, tokens.start_id, tokens.end_id, max_new_tokens).ids
        given = greedy(steps, tokens.start_id, tokens.end_id, max_new_tokens).ids
        if given != expected:
            close = _part_where_close(expected_steps, tokens.start_id, expected, given)
            found = found.merged(Differences(generations=int(not close), close_generations=int(close)))
        targets.append([tokens.start_id, *expected[:-1]])
    return found.merged(_compare_forced(sessions, model, sources, targets))


def _part_where_close(next_logits: NextLogits, start_id: int, expected: Sequence[int], given: Sequence[int]) -> bool:
    """Whether the two best candidates are close at the first token in which two generations differ."""
    same = next(index for index, pair in enumerate(zip(expected, given, strict=False)) if pair[0] != pair[1])
    (row,) = next_logits([[start_id, *expected[:same]]])
    second, best = np.sort(row)[-2:]
    return bool(best - second < CLOSE)


@torch.inference_mode()
def _compare_forced(
    sessions: Sessions, model: Transformer, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> Differences:
    """Read the same targets in PyTorch at once and in ONNX Runtime token by token, rows at different ages."""
    source_lengths = [len(source) for source in sources]
    padded, lengths = _padded(sources, model.config.pad_id), torch.tensor(source_lengths)
    target = _padded(targets, model.config.pad_id)
    memory, _ = model.encode(padded, lengths)
    logits = model(padded, lengths, target).numpy()  # (B, T, V)
    maps = model.attention_maps(padded, lengths, target)
    encoded = encode(sessions, sources)
    found = Differences(
        hidden=_largest([encoded["hidden"] - memory.numpy()]),
        attention=_encoder_map_difference(sessions.manifest, encoded, maps.encoder.numpy()),
    )
    slots = min(target.size(1) + SPARE_SLOTS, sessions.manifest.limits.max_target_tokens)
    states = initial_states(sessions.manifest, encoded, slots)
    outputs = _outputs_to_compare(sessions.manifest)
    for tick in range(target.size(1) + len(targets)):
        # Row i begins i ticks late; before and after its own time it reads its first or last token again and again.
        ages = [min(max(tick - row, 0), len(read) - 1) for row, read in enumerate(targets)]
        tokens = [read[age] for age, read in zip(ages, targets, strict=True)]
        given = run_step(sessions, states, tokens, ages, source_lengths, outputs)
        found = found.merged(
            Differences(
                logits=_score_difference(given, logits[np.arange(len(ages)), ages]),
                attention=_step_map_difference(sessions.manifest, given, maps, ages, source_lengths),
            )
        )
    return found


def _outputs_to_compare(manifest: Manifest) -> list[str]:
    states = {state.output for state in manifest.states}
    return [name for name in manifest.step.outputs if name not in states]


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
    maps: AttentionMaps,
    ages: Sequence[int],
    source_lengths: Sequence[int],
) -> float:
    """Of each row's own columns; beyond them a bundle's maps mean nothing."""
    rows, columns = np.arange(len(ages)), max(ages) + 1

    def difference(kind: str, expected: Tensor, lengths: Array) -> float:
        (name,) = manifest.attention_of(kind).outputs
        at_ages = expected.numpy().swapaxes(2, 3)[:, rows, ages]  # (L, B, H, T, columns) to (L, B, H, columns)
        is_own = np.arange(at_ages.shape[-1]) < lengths[:, None, None, None]
        return _largest([np.where(is_own, given[name] - at_ages.transpose(1, 2, 0, 3), 0.0)])

    decoder = difference("decoder", maps.decoder[..., :columns], np.array(ages) + 1)
    return float(np.maximum(decoder, difference("cross", maps.cross, np.array(source_lengths))))


def _encoder_map_difference(manifest: Manifest, given: Mapping[str, Array], expected: Array) -> float:
    """Of whole maps (L, B, H, S, S): columns of padding are 0 in PyTorch and must be here."""
    names = manifest.attention_of("encoder").outputs
    return _largest(given[name] - layer for name, layer in zip(names, expected, strict=True))


def _padded(rows: Sequence[Sequence[int]], pad_id: int) -> Tensor:
    tensors = [torch.tensor(list(row)) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=pad_id)


def _largest(differences: Iterable[Array]) -> float:
    """The largest absolute value, NaN where there is one."""
    return float(np.max([np.abs(difference).max() for difference in differences]))
