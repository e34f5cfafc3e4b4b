"""Verification of a bundle: its graphs in ONNX Runtime against the NumPy reference.

It needs neither PyTorch nor transformers. `sightline.export.check.recurrent_check` verifies
recurrent models, which have no description.

The bundle is the written one, as it will be served. The reference reads the weights from the
checkpoint, so that errors of the builder are found, too.

Three random texts are short. A long one crosses the limits that depend on positions, as far as the
time allows: the last position, sliding windows, chunks of a prompt, and buckets of relative
positions. Sentences of the user are further texts.

The limits follow from float32 rounding. The reference is also evaluated with random errors of the
size of float32 rounding in all operations, see `sightline.export.check.numpy_reference.Rounded`.
The distances of those results from the exact ones show how the model amplifies rounding. A result
of a graph is accepted if its distance from the exact result is at most `MARGIN` times the largest
of these distances, plus u times the largest result for the rounding of the result itself.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sightline.base.bundle import LABEL_LOGITS, LABEL_OUTPUTS, PREFILL_TOKENS, TOKEN_LABEL_KINDS, Manifest, Verification
from sightline.export.check.check_report import MAPS, Difference, raise_if_exceeded
from sightline.export.check.numpy_reference import EXACT, Arithmetic, Rounded, log_softmax
from sightline.export.check.reference_model import ZEROED, MeasuringLayers, decode_all, encode_all
from sightline.export.check.sessions import DecoderSession, open_session, padded_sources, zero_states
from sightline.export.families.description import Description
from sightline.export.families.weights import Weights
from sightline.export.graphs.nodes import SCORES
from sightline.export.import_errors import VerificationError
from sightline.model.float32 import UNIT_ROUNDOFF, max_abs, rounding_error

Array = NDArray[Any]
SAMPLES = 2  # evaluations of the reference with random rounding errors
# Such an evaluation repeats all texts but the longest up to this number of texts. Where a softmax
# is saturated, few weights decide the largest distance of a short text, and few samples may miss
# it.
SHORT_TEXTS = 12
# The random errors are estimates, and few samples seldom contain the largest possible distance.
# Without a margin, one of 500 right models exceeded its limits, by 3 % (decision record 26).
MARGIN = 2
LENGTHS = (19, 6, 1)  # of the short random texts
NEW_TOKENS = 5  # tokens that are generated after each random text
SENTENCE_TOKENS = 32  # tokens that are generated after each sentence of the user
BATCH_ROWS = 16  # sentences of the user that are verified at a time
CHUNK = 7  # tokens of a short prompt that a decoder-only graph reads at a time
# The long text is as long as the model allows within these limits of one evaluation of the
# reference: multiply-adds with weights, which limit the time, and attention scores of one layer,
# which limit the memory.
LONG_OPERATIONS = 3 * 10**10
LONG_SCORES = 1 << 22
# It has at least this length, because reading the weights takes longer than computing with so few
# tokens. It then consists of three chunks.
LEAST_LONG = 2 * PREFILL_TOKENS + 6
# Longest text of a decoder with an encoder, whose graph runs once for each token: beyond the last
# bucket of relative positions, at distance 128, or without buckets longer than the others.
BUCKETED_TARGET, LONG_TARGET = 140, 40
# Attention weights and logits of a longer text are compared at about this number of positions.
MAX_ROWS = 48
MAP_LAYERS = 4  # number of layers whose attention maps an encoder returns at a time


@dataclass(frozen=True)
class ComparedTexts:
    """Token ids to compare, the longest text first."""

    sources: tuple[tuple[int, ...], ...]  # inputs of the encoder, or prompts of a decoder-only model
    targets: tuple[tuple[int, ...], ...] = ()  # inputs of the decoder for each source


def compared_rows(length: int) -> NDArray[np.int64]:
    """Return the positions of a text whose attention weights and logits are compared.

    They are all positions of a short text. Those of a long one are evenly spaced, and include the
    last ones, at which tokens are generated.
    """
    if length <= MAX_ROWS:
        return np.arange(length)
    last = np.arange(length - max(NEW_TOKENS, SENTENCE_TOKENS), length)
    return np.union1d(np.linspace(0, length - 1, MAX_ROWS).astype(np.int64), last)


def reference_outputs(
    model: Description, weights: Weights, texts: ComparedTexts, arithmetic: Arithmetic = EXACT
) -> dict[str, Array]:
    """Compute the outputs of a model with the reference.

    Returns:
        Of text i: `hidden.i` (S, M), `encoder.i` (layers, H, R, S), `encoder_slots.i`
        (layers, H, R, k), `labels.i`, `predictions.i` (R, V), `logits.i` (R, V), `decoder.i`
        (layers, H, R, T) and `cross.i` (layers, H, R, S), as far as the model has them. R are the
        positions of `compared_rows`.
    """
    outputs, memories = dict[str, Array](), list[Array]()
    if model.encoder is not None:
        rows = [compared_rows(len(source)) for source in texts.sources]
        encoded = encode_all(model, weights, texts.sources, rows, arithmetic)
        memories = [source["hidden"] for source in encoded]
        outputs = {f"{kind}.{number}": array for number, of in enumerate(encoded) for kind, array in of.items()}
    if model.decoder is not None:
        rows = [compared_rows(len(target)) for target in texts.targets]
        decoded = decode_all(model, weights, texts.targets, rows, memories, arithmetic)
        of_decoder = {f"{kind}.{number}": array for number, of in enumerate(decoded) for kind, array in of.items()}
        outputs = of_decoder | outputs  # `hidden` is that of the encoder, if there is one
    return outputs


def rounding_limits(
    model: Description, weights: Weights, texts: ComparedTexts
) -> tuple[dict[str, Array], dict[str, float]]:
    """Return `reference_outputs` and, by name, the largest error that float32 rounding explains."""
    exact = reference_outputs(model, weights, texts)
    largest = dict.fromkeys(exact, 0.0)
    short = list(range(1, len(texts.sources)))
    numbers = [0, *short * (max(1, SHORT_TEXTS // len(short)) if short else 1)]
    repeated = ComparedTexts(
        tuple(texts.sources[number] for number in numbers),
        tuple(texts.targets[number] for number in numbers) if texts.targets else (),
    )
    for seed in range(SAMPLES):
        for repeated_name, array in reference_outputs(model, weights, repeated, Rounded(seed)).items():
            kind, _, index = repeated_name.partition(".")
            name = f"{kind}.{numbers[int(index)]}"
            largest[name] = max(largest[name], max_abs(array - exact[name]))
    # The labels of a text are few numbers, so that the few evaluations of the longest text may all
    # have small errors by chance. Those of all texts together seldom do.
    labels = [name for name, array in exact.items() if name.startswith("labels.") and array.ndim == 1]
    largest |= dict.fromkeys(labels, max((largest[name] for name in labels), default=0.0))
    return exact, {name: MARGIN * largest[name] + UNIT_ROUNDOFF * max_abs(array) for name, array in exact.items()}


class GraphRunner:
    """Runs the graphs of a bundle on texts, and collects the arrays of `reference_outputs`."""

    def __init__(self, folder: Path, manifest: Manifest, model: Description) -> None:
        self._folder = folder
        self._manifest = manifest
        self._model = model
        self._encoder_maps = [maps for maps in manifest.attention if maps.kind in ("encoder", "encoder_slots")]

    def run(
        self, sources: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], new_tokens: int
    ) -> tuple[ComparedTexts, dict[str, Array]]:
        """Run the graphs on sources; the decoder generates `new_tokens` tokens greedily.

        Args:
            sources: the longest one first.
            prompts: inputs of the decoder before the generated tokens, the longest one first. Those
                of a decoder-only model are the sources.

        Returns:
            The sources with the inputs of the decoder, and the outputs. Logits that the graphs do
            not compute are NaN.
        """
        texts = ComparedTexts(tuple(map(tuple, sources)))
        states: list[dict[str, Array]] = [{} for _ in sources]
        outputs: dict[str, Array] = {}
        if self._model.encoder is not None:
            session = open_session(self._folder / self._manifest.encoder_graph.file)
            # The longest text alone: the states of the others would be padded to its length.
            for first, batch in ((0, sources[:1]), (1, sources[1:])):
                for row, arrays in enumerate(self._encode(session, batch) if batch else ()):
                    outputs |= self._encoder_outputs(first + row, arrays)
                    for state in self._manifest.states:
                        if state.encoder_output is not None:
                            states[first + row][state.input] = arrays[state.encoder_output]
            del session  # before the weights of the decoder are loaded
        if self._manifest.predict is not None:
            session = open_session(self._folder / self._manifest.predict.file)
            for number, source in enumerate(sources):
                hidden = outputs[f"hidden.{number}"][compared_rows(len(source))]
                (outputs[f"predictions.{number}"],) = session.run(["logits"], {"hidden": hidden})
        if self._model.decoder is None:
            return texts, outputs
        targets, decoded = self._decode(sources, prompts, states, new_tokens)
        return ComparedTexts(texts.sources, tuple(map(tuple, targets))), outputs | decoded

    def _encode(self, session: Any, sources: Sequence[Sequence[int]]) -> list[dict[str, Array]]:
        """Return each source's encoder outputs without padding; maps have `compared_rows`."""
        feeds = padded_sources(sources, self._manifest.tokens.pad_id)
        kinds = {attention.kind: attention.outputs for attention in self._encoder_maps}
        maps = [name for names in kinds.values() for name in names]
        others = [name for name in self._manifest.encoder_graph.outputs if name not in maps]
        outputs: list[dict[str, Array]] = [{} for _ in sources]
        for name, array in zip(others, session.run(others, feeds), strict=True):
            for row, source in enumerate(sources):
                has_tokens = name in ("hidden", *(LABEL_OUTPUTS[kind] for kind in TOKEN_LABEL_KINDS))
                outputs[row][name] = array[row, : len(source)] if has_tokens else array[row]
        for start in range(0, len(maps), MAP_LAYERS):
            names = maps[start : start + MAP_LAYERS]
            for name, array in zip(names, session.run(list(names), feeds), strict=True):
                for row, source in enumerate(sources):
                    columns = len(source) if name in kinds["encoder"] else array.shape[-1]
                    outputs[row][name] = array[row][:, compared_rows(len(source)), :columns]
        return outputs

    def _encoder_outputs(self, number: int, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return the compared outputs of text `number` from those of its row."""
        outputs = {f"hidden.{number}": arrays["hidden"]}
        for kind in self._encoder_maps:
            outputs[f"{kind.kind}.{number}"] = np.stack([arrays[name] for name in kind.outputs])
        if self._model.head is not None:
            outputs[f"labels.{number}"] = arrays[LABEL_OUTPUTS[self._model.head.label_kind]]
            if self._model.head.label_kind == "classes" and LABEL_LOGITS in arrays:
                outputs[f"label_logits.{number}"] = arrays[LABEL_LOGITS]
        return outputs

    def _decode(
        self,
        sources: Sequence[Sequence[int]],
        prompts: Sequence[Sequence[int]],
        states: Sequence[Mapping[str, Array]],
        new_tokens: int,
    ) -> tuple[list[list[int]], dict[str, Array]]:
        manifest = self._manifest
        kinds: dict[str, str] = {
            attention.kind: attention.outputs[0]
            for attention in manifest.attention
            if attention not in self._encoder_maps
        }
        source_lengths = [len(source) for source in sources]
        session = DecoderSession(self._folder / manifest.decoder_graph.file, manifest.states)
        buffers = zero_states(manifest.states, len(sources), len(prompts[0]) + new_tokens - 1, source_lengths[0])
        for row, arrays in enumerate(states):
            for name, array in arrays.items():
                buffers[name][row][tuple(map(slice, array.shape))] = array
        is_decoder_only, requested = self._model.is_decoder_only, [*SCORES, *kinds.values()]
        if is_decoder_only:
            requested.append("hidden")
        collected = [_Collected(len(prompt) + new_tokens - 1) for prompt in prompts]
        fed: list[list[int]] = [[] for _ in prompts]

        def read(first: int, tokens: Array) -> dict[str, Array]:
            """Read tokens (B, S) of rows from `first` on; S is 1 for a decoder with an encoder."""
            rows = slice(first, first + len(tokens))
            lengths = [len(done) for done in fed[rows]]
            ids = tokens if is_decoder_only else tokens[:, 0]
            read_states = {name: buffer[rows] for name, buffer in buffers.items()}
            call_outputs = session.run(read_states, ids, lengths, requested, source_lengths[rows])
            check_scores(self._folder, call_outputs)
            for row, new in enumerate(tokens.tolist()):
                number = first + row
                fed[number] += new
                collected[number].add(call_outputs, row, len(fed[number]), kinds, len(new), source_lengths[number])
            return call_outputs

        # All tokens of a prompt but the last are read alone, so that the rows then differ in age.
        for row, prompt in enumerate(prompts):
            size = 1
            if is_decoder_only:
                size = CHUNK if len(prompt) < LEAST_LONG else PREFILL_TOKENS
            for start in range(0, len(prompt) - 1, size):
                read(row, np.array([prompt[start : min(start + size, len(prompt) - 1)]]))
        tokens = np.array([[prompt[-1]] for prompt in prompts])
        for _ in range(new_tokens):
            tokens = read(0, tokens)["logits"].argmax(axis=-1)[:, None]
        outputs: dict[str, Array] = {}
        for row, sequence in enumerate(collected):
            outputs |= {f"{name}.{row}": array for name, array in sequence.arrays().items()}
        return fed, outputs


class _Collected:
    """Outputs of the calls for one sequence, at the positions of `compared_rows`."""

    def __init__(self, length: int) -> None:
        """Create a collection for a sequence of `length` inputs of the decoder."""
        self._rows = compared_rows(length)
        self._parts: dict[str, list[Array]] = {"logits": []}

    def add(
        self, outputs: Mapping[str, Array], row: int, total: int, kinds: Mapping[str, str], new: int, source: int
    ) -> None:
        """Add the outputs of a call that read `new` tokens, so that `total` tokens were read."""
        start = total - new
        kept = self._rows[(start <= self._rows) & (self._rows < total)] - start  # among the new tokens
        logits = np.full((len(kept), outputs["logits"].shape[1]), np.nan, np.float32)
        logits[kept == new - 1] = outputs["logits"][row]
        self._parts["logits"].append(logits)
        if "hidden" in outputs:
            self._parts.setdefault("hidden", []).append(outputs["hidden"][row])
        for kind, name in kinds.items():
            maps = outputs[name][row]  # (H, L, columns), or (H, L, new, columns)
            maps = maps.reshape(*maps.shape[:2], new, maps.shape[-1])[:, :, kept].swapaxes(0, 1)
            self._parts.setdefault(kind, []).append(maps[..., : source if kind == "cross" else total])

    def arrays(self) -> dict[str, Array]:
        arrays = {}
        for kind, parts in self._parts.items():
            columns, ndim = max(part.shape[-1] for part in parts), parts[0].ndim
            padded = [np.pad(part, [(0, 0)] * (ndim - 1) + [(0, columns - part.shape[-1])]) for part in parts]
            arrays[kind] = np.concatenate(padded, axis=ndim - 2)
        return arrays


def check_scores(bundle: object, outputs: Mapping[str, Array]) -> None:
    """Check that the other outputs of a decoder graph follow from its logits (B, V)."""
    logits = outputs["logits"].astype(np.float64)
    if np.isnan(logits).any():
        return  # the comparison of logits finds it
    exact = log_softmax(logits)
    error = max_abs(outputs["logprobs"] - exact)
    limit = rounding_error(logits.shape[1]) * (1 + max_abs(exact))
    top, ids = outputs["top_logprobs"], outputs["top_ids"]
    is_top = np.array_equal(np.take_along_axis(outputs["logprobs"], ids, axis=-1), top) and bool(
        ((outputs["logprobs"] > top[:, -1:]).sum(axis=-1) < top.shape[1]).all()
    )
    if not (error <= limit and is_top):
        raise VerificationError(
            f"log-probabilities of {bundle} differ by {error:.2g} from those of its logits, or the most "
            f"probable tokens are others; float32 rounding explains at most {limit:.2g}; please report this "
            "checkpoint"
        )


def long_length(manifest: Manifest, model: Description) -> int:
    """Return the length of the long text within the limits of time and memory, not of the model."""
    stack = model.first_stack
    matrices = max(1, manifest.parameters - model.vocabulary * stack.width)  # without the table of tokens
    heads = max(attention.heads for attention in stack.attention)
    return max(LEAST_LONG, min(LONG_OPERATIONS // matrices, math.isqrt(LONG_SCORES // heads)))


def random_inputs(manifest: Manifest, model: Description, seed: int) -> tuple[list[list[int]], list[list[int]], int]:
    """Return random sources, prompts and number of new tokens for `GraphRunner.run`."""
    generator = np.random.default_rng(seed)
    new_tokens = min(NEW_TOKENS, manifest.limits.max_target_tokens)
    limit = manifest.limits.max_source_tokens
    if model.is_decoder_only:
        limit = min(limit, manifest.limits.max_target_tokens - new_tokens)
    lengths = sorted({max(1, min(length, limit)) for length in (long_length(manifest, model), *LENGTHS)}, reverse=True)
    vocabulary = manifest.limits.source_vocabulary or model.vocabulary
    sources = [[int(id_) for id_ in generator.integers(vocabulary, size=length)] for length in lengths]
    prompts = [list(manifest.decoder_prompt_ids(source)) for source in sources]
    if model.encoder is not None and model.decoder is not None:
        # The decoder reads random tokens after the long text, because generated ones often repeat.
        most = LONG_TARGET if model.decoder.relative_bias is None else BUCKETED_TARGET
        longest = min(lengths[0], most, manifest.limits.max_target_tokens - new_tokens)
        forced = generator.integers(model.vocabulary, size=max(0, longest - len(prompts[0])))
        prompts[0] += [int(id_) for id_ in forced]
    return sources, prompts, new_tokens


def verify(
    folder: Path,
    manifest: Manifest,
    model: Description,
    weights: Weights,
    sentences: Sequence[Sequence[int]] = (),
    tolerance: float | None = None,
) -> Verification:
    """Compare the graphs of a bundle with the reference, see the module.

    Raises `VerificationError`.

    Args:
        manifest: its manifest; `verification` is not read.
        sentences: token ids of sentences that are compared in addition to random texts.
        tolerance: the largest allowed difference, in place of the derived limits.
    """
    inputs = [random_inputs(manifest, model, seed=0), *_sentence_inputs(manifest, sentences)]
    differences: dict[str, list[Difference]] = {}
    different = close = 0
    for sources, prompts, new_tokens in inputs:
        texts, graph_outputs = GraphRunner(folder, manifest, model).run(sources, prompts, new_tokens)
        exact, limits = rounding_limits(model, weights, texts)
        for name, difference in differences_of(graph_outputs, exact).items():
            differences.setdefault(name.partition(".")[0], []).append((difference, limits[name]))
        numbers = _count_generations(new_tokens, texts, exact, limits)
        different, close = different + numbers[0], close + numbers[1]
    if manifest.contributions is not None:
        (source, *_), (target, *_), _ = inputs[0]
        path, ids = folder / manifest.contributions.file, (source[: LENGTHS[0]], target[: LENGTHS[1]])
        differences["contributions"] = compare_contributions(path, model, weights, *ids)
    advice = "" if manifest.origin is None else "; please report this checkpoint"
    raise_if_exceeded(f"{folder} and its checkpoint", differences, different, tolerance, advice)
    has_scores = model.decoder is not None or model.head is not None or model.predictions is not None
    scores = ("logits", "labels", "predictions") if has_scores else ("hidden",)
    found_scores = [pair for kind in scores for pair in differences.get(kind, ())]
    maps = [difference for kind in MAPS for difference, _ in differences.get(kind, ())]
    return Verification(
        sentences=len(sentences) or len(inputs[0][0]),
        longest=max(len(source) for sources, _, _ in inputs for source in sources),
        tolerance=tolerance if tolerance is not None else max((limit for _, limit in found_scores), default=0.0),
        max_logit_difference=max((difference for difference, _ in found_scores), default=0.0),
        max_attention_difference=max(maps, default=0.0),
        different_generations=different,
        close_generations=close,
    )


def compare_contributions(
    graph: Path, model: Description, weights: Weights, source: Sequence[int], target: Sequence[int]
) -> list[Difference]:
    """Compare the graph of contributions; `target` are the inputs of the decoder."""
    session, sizes = open_session(graph), {"zeroed_tokens": np.array([ZEROED])}
    names = [output.name for output in session.get_outputs()]
    arrays = session.run(names, {"source_ids": np.array([source]), "target_ids": np.array([target]), **sizes})

    def measure(arithmetic: Arithmetic) -> dict[str, Array]:
        encoder = MeasuringLayers(weights, "encoder", model.encoder_stack, arithmetic)
        decoder = MeasuringLayers(weights, "decoder", model.decoder_stack, arithmetic)
        decoder.measure(target, encoder.measure(source, []))
        return {name: np.stack(layers) for name, layers in (encoder.measures | decoder.measures).items()}

    exact, *samples = map(measure, (EXACT, *map(Rounded, range(SAMPLES))))
    limits = {name: MARGIN * max(max_abs(sample[name] - array) for sample in samples) for name, array in exact.items()}
    return [
        (difference, limits[name] + UNIT_ROUNDOFF * max_abs(exact[name]))
        for name, difference in differences_of(dict(zip(names, arrays, strict=True)), exact).items()
    ]


def _sentence_inputs(
    manifest: Manifest, sentences: Sequence[Sequence[int]]
) -> Iterator[tuple[list[list[int]], list[list[int]], int]]:
    """Yield batches of sentences as arguments of `GraphRunner.run`."""
    ordered = sorted((list(sentence) for sentence in sentences), key=len, reverse=True)
    for start in range(0, len(ordered), BATCH_ROWS):
        sources = ordered[start : start + BATCH_ROWS]
        new_tokens = min(SENTENCE_TOKENS, manifest.max_new_tokens_for(len(sources[0])))
        yield sources, [list(manifest.decoder_prompt_ids(source)) for source in sources], max(1, new_tokens)


def differences_of(graph_outputs: Mapping[str, Array], exact: Mapping[str, Array]) -> dict[str, float]:
    """Return the largest absolute difference by name; logits that were not computed are ignored.

    Raises `ValueError` if an array is missing or has another shape.
    """
    if graph_outputs.keys() != exact.keys():
        raise ValueError(f"the graphs return {sorted(graph_outputs)}, the reference {sorted(exact)}")
    differences = {}
    for name, array in graph_outputs.items():
        if array.shape != exact[name].shape:
            raise ValueError(f"{name} has the shape {array.shape}, that of the reference {exact[name].shape}")
        difference = array - exact[name]
        if name.startswith("logits."):
            difference = difference[~np.isnan(array).all(axis=-1)]
        differences[name] = max_abs(difference)
    return differences


def _count_generations(
    new_tokens: int, texts: ComparedTexts, exact: Mapping[str, Array], limits: Mapping[str, float]
) -> tuple[int, int]:
    """Compare each generated token with the best token of the reference after the same tokens.

    The last generated token is not compared, because no step reads it.

    Returns:
        The number of texts with another token although the two are not close, and the number of
        texts with another token of which the logits differ by at most twice the limit.
    """
    different = close = 0
    if new_tokens == 1:
        return 0, 0
    for number, target in enumerate(texts.targets):
        logits = exact[f"logits.{number}"][-new_tokens:-1]
        chosen = logits[np.arange(new_tokens - 1), list(target[len(target) - new_tokens + 1 :])]
        gaps = logits.max(axis=-1) - chosen
        if (gaps > 2 * limits[f"logits.{number}"]).any():
            different += 1
        elif (gaps > 0).any():
            close += 1
    return different, close
