"""Verification of a bundle of a recurrent model: its graphs in ONNX Runtime against PyTorch.

Recurrent models have no description, so that `export.check.verify` cannot verify them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from export.check.report import check_inputs, raise_if_exceeded
from export.check.sessions import Array, Sessions, onnx_steps, read_sources, run_step
from export.check.verify import compare_cosines
from export.graphs.recurrent import STATE_INPUTS
from model.architectures.recurrent import RecurrentModel, State, Step
from model.data.batches import pad
from model.decoding.reference import greedy, one_thread, pytorch_steps
from model.rounding import Reference, reference
from service.bundle import Manifest, Verification

PERTURBED_PAIRS = 2  # pairs of perturbed models, see `model.rounding`; few are enough, because a batch has many values
BATCH_ROWS = 16
MAX_NEW_TOKENS = 80
SPARE_POSITIONS = 3  # the caches of the service are longer than its sequences
KINDS = ("hidden", "logits", "attention", "states")  # of outputs; logits include log-probabilities

Ids = Sequence[int]


@dataclass(frozen=True)
class Compared:
    """Comparison of one batch."""

    found: Mapping[str, float]  # the largest difference of each kind
    limits: Mapping[str, float]  # the largest difference of each kind that rounding explains
    generations: int = 0  # that differ although rounding does not explain it
    close_generations: int = 0  # that differ first where the two best candidates are close


def verify(
    sessions: Sessions,
    model: RecurrentModel,
    tokenizer: Tokenizer,
    sentences: Sequence[str],
    tolerance: float | None = None,
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
    sources = [encoding.ids for encoding in tokenizer.encode_batch(list(sentences))]
    check_inputs(sources, sessions.manifest.limits.max_source_tokens, tolerance)
    models = reference(model, PERTURBED_PAIRS)
    with one_thread():
        compared = [
            _compare_batch(sessions, models, sources[start : start + BATCH_ROWS])
            for start in range(0, len(sources), BATCH_ROWS)
        ]
    differences = {kind: [(one.found[kind], one.limits.get(kind, 0.0)) for one in compared] for kind in KINDS}
    generations = sum(one.generations for one in compared)
    if sessions.similar is not None:
        differences["cosines"] = [compare_cosines(sessions.similar, model.embedding.weight.detach().numpy())]
    raise_if_exceeded("ONNX Runtime and PyTorch", differences, generations, tolerance)
    return Verification(
        sentences=len(sentences),
        tolerance=tolerance if tolerance is not None else max(limit for _, limit in differences["logits"]),
        max_logit_difference=max(found for found, _ in differences["logits"]),
        max_attention_difference=max(found for found, _ in differences["attention"]),
        different_generations=generations,
        close_generations=sum(one.close_generations for one in compared),
    )


def _compare_batch(sessions: Sessions, models: Reference[RecurrentModel], sources: Sequence[Sequence[int]]) -> Compared:
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
    return replace(compared, generations=generations, close_generations=close_generations)


@torch.inference_mode()
def _differ_where_close(
    models: Reference[RecurrentModel],
    source: Sequence[int],
    first_id: int,
    expected: Sequence[int],
    given: Sequence[int],
) -> bool:
    """Return True if rounding explains the first token in which two generations differ.

    Rounding may increase the logit of one candidate and decrease that of the other, each by at most
    its limit.
    """
    same = next(index for index, pair in enumerate(zip(expected, given, strict=False)) if pair[0] != pair[1])
    read = [first_id, *expected[:same]]

    def compute(model: RecurrentModel) -> dict[str, Array]:
        return {"logits": forced_pass(model, [source], [read]).logits[0, -1].numpy()}

    exact, limits = models.limits(compute)
    row = exact["logits"]
    return bool(row.max() - row[given[same]] <= 2 * limits["logits"])


@dataclass(frozen=True)
class ForcedPass:
    """Results of one pass over padded sources (B, S) and decoder inputs (B, T).

    Values at padding are undefined.
    """

    hidden: Tensor  # (B, S, M)
    logits: Tensor  # (B, T, V)
    cross: Tensor | None  # cross-attention weights (L, B, H, T, S), None without attention
    # States before each token and after the last, (B, T + 1, ...), by input name of the graph.
    states: Mapping[str, Tensor]


def forced_pass(
    model: RecurrentModel,
    sources: Sequence[Ids],
    targets: Sequence[Ids],
    carried: Mapping[str, Tensor] | None = None,
) -> ForcedPass:
    """Run a model over sources and given targets.

    Args:
        model: in evaluation mode.
        sources: token ids.
        targets: decoder inputs. They begin with the start token.
        carried: `ForcedPass.states` of another pass. Each step starts from them instead of the
            state that the step before computed.
    """
    padded, lengths = pad(sources, model.config.pad_id), torch.tensor([len(source) for source in sources])
    memory, _ = model.encode(padded, lengths)
    after, steps = [model.initial_state(memory)], list[Step]()
    for position, embedded in enumerate(model.embed_steps(pad(targets, model.config.pad_id))):
        state = after[-1]
        if carried:
            state = State(*(carried[STATE_INPUTS[name]][:, position] for name in State._fields))
        steps.append(model.step(embedded, position, state, memory, lengths))
        after.append(steps[-1].state)
    features, cross = model.stack_steps(steps)
    states = {
        STATE_INPUTS[name]: torch.stack([getattr(state, name) for state in after], dim=1) for name in State._fields
    }
    return ForcedPass(memory.annotations, model.logits(features), cross, states)


@torch.inference_mode()
def _compare_forced(
    sessions: Sessions,
    models: Reference[RecurrentModel],
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
    expected = forced_pass(models.exact, sources, targets, carried)

    def compute(model: RecurrentModel) -> dict[str, Array]:
        return _values(forced_pass(model, sources, targets, carried), sources, targets)

    logits = expected.logits.numpy()
    longest = max(map(len, targets))
    encoded, first = read_sources(sessions, sources, min(longest + SPARE_POSITIONS, manifest.limits.max_target_tokens))
    is_own = _token_mask(sources)[:, :, None]
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    found["hidden"].append(largest([np.where(is_own, encoded["hidden"] - expected.hidden.numpy(), 0.0)]))
    states = {name: array.copy() for name, array in first.items()}
    before = {name: array.numpy() for name, array in carried.items() if name in states}
    after = {name: expected.states[name].numpy() for name in before}
    found["states"].append(largest(first[name] - array[:, 0] for name, array in after.items()))
    outputs = _outputs_to_compare(manifest)
    for tick in range(max(row + len(read) for row, read in enumerate(targets))):
        # Row i starts i ticks late, from its initial states. After its last token, it repeats that
        # token.
        for row in range(tick, len(targets)):
            for name, array in states.items():
                array[row] = first[name][row]
        ages = [min(max(tick - row, 0), len(read) - 1) for row, read in enumerate(targets)]
        tokens = [read[age] for age, read in zip(ages, targets, strict=True)]
        for name, array in before.items():
            states[name][:] = array[range(len(targets)), ages]
        given = run_step(sessions, states, tokens, ages, source_lengths, outputs)
        running = np.array([row for row, read in enumerate(targets) if row <= tick < row + len(read)])
        if not len(running):
            continue
        given = {name: array[running] for name, array in given.items()}
        indices = running, np.array(ages)[running]
        own = np.array(source_lengths)[running]
        found["logits"].append(_score_difference(given, logits[indices]))
        found["attention"].append(_map_difference(manifest, given, expected.cross, indices, own))
        found["states"].append(
            largest(states[name][running] - array[running, indices[1] + 1] for name, array in after.items())
        )
    _, limits = models.limits(compute)
    return Compared({kind: largest([np.array(each)]) for kind, each in found.items()}, limits)


def _token_mask(sources: Sequence[Sequence[int]]) -> Array:
    """Return a mask (B, S) that is True for tokens and False for padding."""
    lengths = np.array([len(source) for source in sources])
    return np.arange(lengths.max()) < lengths[:, None]


def _values(given: ForcedPass, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> dict[str, Array]:
    """Return the compared values of a pass without padding, by kind."""
    parts: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    for row, (source, read) in enumerate(zip(sources, targets, strict=True)):
        logits = given.logits[row, : len(read)]
        parts["hidden"].append(given.hidden[row, : len(source)])
        parts["logits"] += [logits, logits.log_softmax(dim=-1)]
        if given.cross is not None:
            parts["attention"].append(given.cross[:, row, :, : len(read)])
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
    return largest(
        [
            given["logits"] - logits,
            given["logprobs"] - logprobs,
            given["top_logprobs"] - top,
            given["top_logprobs"] - np.take_along_axis(given["logprobs"], given["top_ids"], axis=-1),
        ]
    )


def _map_difference(
    manifest: Manifest, given: Mapping[str, Array], cross: Tensor | None, indices: tuple[Array, Array], own: Array
) -> float:
    """Return the largest difference of the cross-attention weights of a decoder step.

    Columns beyond the length of a row are ignored, because their values are undefined.

    Args:
        manifest: manifest of the bundle.
        given: outputs of the step, for the running rows.
        cross: attention weights of PyTorch (L, B, H, T, columns), None without attention.
        indices: the running rows, and the number of the step that each is at.
        own: number of defined columns of each running row.
    """
    if cross is None:
        return 0.0
    (name,), (rows, ages) = manifest.attention_of("cross").outputs, indices
    at_ages = cross.numpy().swapaxes(2, 3)[:, rows, ages].transpose(1, 2, 0, 3)  # (B, H, L, columns)
    columns = min(at_ages.shape[3], given[name].shape[3])
    is_own = np.arange(columns) < own[:, None, None, None]
    return largest([np.where(is_own, given[name][..., :columns] - at_ages[..., :columns], 0.0)])


def largest(differences: Iterable[Array]) -> float:
    """Return the largest absolute value; NaN if there is one, and 0 without values."""
    return float(np.max([np.abs(difference).max() for difference in differences], initial=0))
