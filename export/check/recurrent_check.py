"""Verification of a bundle of a recurrent model: its graphs in ONNX Runtime against PyTorch.

Recurrent models have no description, so that `sightline.export.check.verify` cannot verify them.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from tokenizers import Tokenizer

from sightline.base.bundle import Verification
from sightline.export.check.check_report import Difference, raise_if_exceeded
from sightline.export.check.sessions import Array, Sessions, onnx_steps, read_sources, run_step
from sightline.export.check.verify import check_scores
from sightline.export.graphs.nodes import SCORES
from sightline.export.graphs.recurrent_graphs import STATE_INPUTS
from sightline.model.architectures.recurrent import RecurrentModel, RecurrentState, RecurrentStep
from sightline.model.data.batches import pad
from sightline.model.decoding import one_thread, search, translate_batch
from sightline.model.float32 import max_abs
from sightline.model.rounding import Reference, reference

PERTURBED_PAIRS = 2  # see `sightline.model.rounding`; few are enough, because a batch has many values
BATCH_ROWS = 16
MAX_NEW_TOKENS = 80
SPARE_POSITIONS = 3  # the caches of the service are longer than its sequences
KINDS = ("hidden", "logits", "attention", "states")  # of outputs

Ids = Sequence[int]


def verify(
    sessions: Sessions,
    model: RecurrentModel,
    tokenizer: Tokenizer,
    sentences: Sequence[str],
    tolerance: float | None = None,
) -> Verification:
    """Compare all outputs of a bundle, and whole greedy generations, with its PyTorch model.

    The reference is the model in float64 and evaluation mode. The largest allowed difference is
    derived for each batch by `sightline.model.rounding`, so that the limits hold on every
    processor; a tolerance replaces it.

    Raises `VerificationError`.
    """
    sources = [encoding.ids for encoding in tokenizer.encode_batch(list(sentences))]
    models = reference(model, PERTURBED_PAIRS)
    with one_thread():
        compared = [
            _compare_batch(sessions, models, sources[start : start + BATCH_ROWS])
            for start in range(0, len(sources), BATCH_ROWS)
        ]
    differences = {kind: [found[kind] for found, _, _ in compared] for kind in KINDS}
    generations = sum(different for _, different, _ in compared)
    raise_if_exceeded("ONNX Runtime and PyTorch", differences, generations, tolerance)
    return Verification(
        sentences=len(sentences),
        tolerance=tolerance if tolerance is not None else max(limit for _, limit in differences["logits"]),
        max_logit_difference=max(difference for difference, _ in differences["logits"]),
        max_attention_difference=max(difference for difference, _ in differences["attention"]),
        different_generations=generations,
        close_generations=sum(close for _, _, close in compared),
    )


def _compare_batch(
    sessions: Sessions, models: Reference[RecurrentModel], sources: Sequence[Ids]
) -> tuple[dict[str, Difference], int, int]:
    """Compare one batch.

    Returns:
        The difference of each kind, the number of generations that differ although rounding does
        not explain it, and the number of those that differ first where two candidates are close.
    """
    manifest, end_ids = sessions.manifest, sessions.manifest.tokens.end_ids
    generations, close_generations, targets = 0, 0, []
    for source in sources:
        first_id = manifest.decoder_prompt_ids(source)[-1]
        max_new_tokens = min(MAX_NEW_TOKENS, manifest.max_new_tokens_for(len(source)))
        (expected,) = translate_batch(models.exact, [source], max_new_tokens)
        (generated,) = search(onnx_steps(sessions, source), 1, first_id, end_ids, max_new_tokens)
        if generated != expected:
            is_close = _differ_where_close(models, source, first_id, expected, generated)
            generations, close_generations = generations + (not is_close), close_generations + is_close
        targets.append([first_id, *expected[:-1]])
    return _compare_forced(sessions, models, sources, targets), generations, close_generations


def _differ_where_close(
    models: Reference[RecurrentModel], source: Ids, first_id: int, expected: Ids, generated: Ids
) -> bool:
    """Return True if rounding explains the first token in which two generations differ.

    Rounding may increase one logit and decrease the other, each by at most its limit.
    """
    same = next(index for index, pair in enumerate(zip(expected, generated, strict=False)) if pair[0] != pair[1])
    read = [first_id, *expected[:same]]
    exact, limits = models.limits(lambda model: {"logits": forced_pass(model, [source], [read])["logits"][0, -1]})
    row = exact["logits"]
    return bool(row.max() - row[generated[same]] <= 2 * limits["logits"])


@torch.inference_mode()
def forced_pass(
    model: RecurrentModel, sources: Sequence[Ids], targets: Sequence[Ids], carried: Mapping[str, Array] | None = None
) -> dict[str, Array]:
    """Run a model in evaluation mode over sources and given targets.

    Args:
        targets: decoder inputs. They begin with the start token.
        carried: the states of another pass. Each step starts from them instead of the state that
            the step before computed.

    Returns:
        `hidden` (B, S, M), `logits` (B, T, V), `cross` (B, T, S) if the model has attention, and
        the states before each token and after the last, (B, T + 1, ...), by input name of the
        graph. Values at padding are undefined.
    """
    padded, lengths = pad(sources, model.config.pad_id), torch.tensor([len(source) for source in sources])
    memory, _ = model.encode(padded, lengths)
    after, steps = [model.initial_state(memory)], list[RecurrentStep]()
    for position, embedded in enumerate(model.embed_steps(pad(targets, model.config.pad_id))):
        state = after[-1]
        if carried:
            state = RecurrentState(
                *(torch.from_numpy(carried[STATE_INPUTS[name]][:, position]) for name in RecurrentState._fields)
            )
        steps.append(model.step(embedded, position, state, memory, lengths))
        after.append(steps[-1].state)
    features, cross = model.stack_steps(steps)
    outputs = {"hidden": memory.annotations, "logits": model.logits(features)}
    if cross is not None:
        outputs["cross"] = cross[0, :, 0]
    for name in RecurrentState._fields:
        outputs[STATE_INPUTS[name]] = torch.stack([getattr(state, name) for state in after], dim=1)
    return {name: array.numpy() for name, array in outputs.items()}


def graph_pass(
    sessions: Sessions, sources: Sequence[Ids], targets: Sequence[Ids], carried: Mapping[str, Array]
) -> dict[str, Array]:
    """Return the arrays of `forced_pass` from the graphs; values that they do not compute are 0.

    Raises `VerificationError` if log-probabilities do not follow from their logits.
    """
    manifest, lengths = sessions.manifest, [len(source) for source in sources]
    longest, rows = max(map(len, targets)), len(targets)
    encoded, first = read_sources(sessions, sources, min(longest + SPARE_POSITIONS, manifest.limits.max_target_tokens))
    states = {name: array.copy() for name, array in first.items()}
    updated = [name for name in carried if name in first]
    cross = [name for maps in manifest.attention for name in maps.outputs]
    outputs = {name: np.repeat(first[name][:, None], longest + 1, axis=1) for name in updated}
    outputs["hidden"] = encoded["hidden"]
    outputs["logits"] = np.zeros((rows, longest, manifest.limits.vocabulary), np.float32)
    if cross:
        outputs["cross"] = np.zeros((rows, longest, max(lengths)), np.float32)
    for tick in range(max(row + len(read) for row, read in enumerate(targets))):
        # Row i starts i ticks late, from its initial states. After its last token, it repeats that
        # token.
        ages = np.array([min(max(tick - row, 0), len(read) - 1) for row, read in enumerate(targets)])
        for name, array in states.items():
            array[tick:] = first[name][tick:]
            if name in updated:
                array[:] = carried[name][range(rows), ages]
        tokens = [read[age] for age, read in zip(ages, targets, strict=True)]
        step_outputs = run_step(sessions, states, tokens, ages.tolist(), lengths, [*SCORES, *cross])
        check_scores(manifest.name, step_outputs)
        running = [row for row, read in enumerate(targets) if row <= tick < row + len(read)]
        at = running, ages[running]
        outputs["logits"][at] = step_outputs["logits"][running]
        for name in cross:  # (B, 1, 1, columns)
            outputs["cross"][at] = step_outputs[name][running, 0, 0, : max(lengths)]
        for name in updated:
            outputs[name][running, ages[running] + 1] = states[name][running]
    return outputs


def _compare_forced(
    sessions: Sessions, models: Reference[RecurrentModel], sources: Sequence[Ids], targets: Sequence[Ids]
) -> dict[str, Difference]:
    """Compare teacher-forced decoding.

    PyTorch runs one pass, ONNX Runtime steps, with rows that start at different times. Each step of
    a recurrent decoder starts from the states of PyTorch: a trained decoder can amplify rounding
    errors from step to step, so that after some sixty steps even float32 and float64 in PyTorch
    differ too much for a comparison.
    """
    expected = forced_pass(models.exact, sources, targets)
    # Rounded to float32, like the inputs of the graph.
    carried = {name: expected[name].astype(np.float32).astype(np.float64) for name in STATE_INPUTS.values()}
    graph_outputs = graph_pass(sessions, sources, targets, carried)

    def values(outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the values that the graphs compute, without padding, by kind."""
        parts: dict[str, list[Array]] = {kind: [np.empty(0)] for kind in KINDS}
        for row, (source, read) in enumerate(zip(sources, targets, strict=True)):
            parts["hidden"].append(outputs["hidden"][row, : len(source)])
            parts["logits"].append(outputs["logits"][row, : len(read)])
            if "cross" in graph_outputs:
                parts["attention"].append(outputs["cross"][row, : len(read), : len(source)])
            parts["states"] += [outputs[name][row, : len(read) + 1] for name in carried if name in graph_outputs]
        return {kind: np.concatenate([array.ravel() for array in arrays]) for kind, arrays in parts.items()}

    exact, limits = models.limits(lambda model: values(forced_pass(model, sources, targets, carried)))
    computed = values(graph_outputs)
    return {kind: (max_abs(computed[kind] - exact[kind]), limits[kind]) for kind in KINDS}
