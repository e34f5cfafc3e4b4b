"""A deterministic model without weights whose results change if rows are mixed up.

The next token of a row depends on a hash of its source and of all its decoder inputs, which are
stored in its states only. Values that a real runner leaves undefined (padding, unused rows) are
garbage here.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sightline.base.bundle import (
    LABEL_LOGITS,
    LABEL_OUTPUTS,
    SCHEMA_VERSION,
    TOKEN_LABEL_KINDS,
    TOP_TOKENS,
    AttentionMaps,
    Graph,
    LabelKind,
    Limits,
    Manifest,
    State,
    Task,
    Tokens,
    is_entailment,
)
from sightline.service.runtime.runner import BLOCK_TOKENS, Array, Bools, Int32, Int64

KINDS: tuple[Literal["encoder", "cross", "decoder"], ...] = ("encoder", "cross", "decoder")
LABELS = ("bad", "fair", "good")
NLI_LABELS = ("contradiction", "neutral", "entailment")
HIDDEN = 4  # size of the encoder's last layer
GARBAGE = -12345.0
PRIME = 65521  # hashes are smaller, so that float32 represents them exactly


def fake_manifest(
    name: str = "fake",
    *,
    vocabulary: int = 48,
    layers: int = 2,
    heads: int = 2,
    max_source_tokens: int = 24,
    max_target_tokens: int = 24,
    decoder_start: Literal["start_token", "source"] = "start_token",
) -> Manifest:
    """Return the manifest of a FakeRunner. Token 0 is padding, 1 the start, 2 the end."""
    attention = tuple(
        AttentionMaps(
            kind=kind, outputs=tuple(f"{kind}_attention_{layer}" for layer in range(layers)), layers=layers, heads=heads
        )
        for kind in KINDS
    )
    maps = {one.kind: one.outputs for one in attention}
    states: tuple[State, ...] = (
        State(input="source", init="encoder", encoder_output="source_state", shape=("source",)),
        State(input="read", output="read_next", init="zeros", shape=("target",)),
        State(input="hash", output="hash_next", init="zeros", shape=(1,)),
    )
    encoder: Graph | None = Graph(
        file="encoder.onnx",
        inputs=("source_ids", "source_lengths"),
        outputs=("hidden", "source_state", "hash_state", *maps["encoder"]),
    )
    inputs: tuple[str, ...] = ("token_ids", "lengths", "source_lengths")
    more_outputs = maps["cross"]
    if decoder_start == "source":
        # The hash follows from what was read, so that it needs no state.
        encoder, states, attention = None, states[1:2], attention[2:]
        inputs, more_outputs = inputs[:2], ("hidden",)
    return Manifest(
        schema_version=SCHEMA_VERSION,
        name=name,
        architecture="fake",
        description="A deterministic model without weights.",
        license="Apache-2.0",
        created=0,
        dtype="float32",
        tasks=("generate", "encode", "attention"),
        parameters=0,
        source_tokenizer="tokenizer.json",
        target_tokenizer="tokenizer.json",
        tokens=Tokens(pad_id=0, start_ids=(1,), end_ids=(2,)),
        decoder_start=decoder_start,
        limits=Limits(max_source_tokens=max_source_tokens, max_target_tokens=max_target_tokens, vocabulary=vocabulary),
        encoder=encoder,
        decoder=Graph(
            file="step.onnx",
            inputs=(*inputs, *(state.input for state in states)),
            outputs=(
                *("logits", "logprobs", "top_logprobs", "top_ids"),
                *(state.output for state in states if state.output is not None),
                *more_outputs,
                *maps["decoder"],
            ),
        ),
        states=states,
        attention=attention,
        verification=None,
        files={},
    )


TASK_OF_KIND: dict[LabelKind, Task] = {
    "classes": "classify",
    "independent": "classify",
    "score": "rerank",
    "tokens": "tag",
    "span": "answer",
}


def fake_classifier_manifest(
    name: str = "fake-classifier", label_kind: LabelKind = "classes", labels: Sequence[str] = LABELS, **sizes: Any
) -> Manifest:
    """Return the manifest of a FakeRunner that is a classifier; by default with three labels."""
    whole = fake_manifest(name, **sizes)
    encoder_maps = whole.attention_of("encoder")
    logits = (LABEL_LOGITS,) if label_kind == "classes" and any(map(is_entailment, labels)) else ()
    outputs = ("hidden", *logits, LABEL_OUTPUTS[label_kind], *encoder_maps.outputs)
    return whole.model_copy(
        update={
            "tasks": ("encode", "attention", TASK_OF_KIND[label_kind]),
            "limits": whole.limits.model_copy(update={"max_target_tokens": 0}),
            "encoder": whole.encoder_graph.model_copy(update={"outputs": outputs}),
            "decoder": None,
            "states": (),
            "attention": (encoder_maps,),
            "labels": tuple(labels),
            "label_kind": label_kind,
        }
    )


def fake_masked_manifest(name: str = "fake-masked", *, mask_id: int | None = 3, **sizes: Any) -> Manifest:
    """Return the manifest of a FakeRunner that predicts masked tokens."""
    whole = fake_classifier_manifest(name, **sizes)
    tasks: tuple[Task, ...] = ("encode", "attention", "fill-mask", "sparse")
    return whole.model_copy(
        update={
            "tasks": tasks if mask_id is not None else tuple(task for task in tasks if task != "fill-mask"),
            "tokens": whole.tokens.model_copy(update={"mask_id": mask_id}),
            "encoder": whole.encoder_graph.model_copy(update={"outputs": ("hidden", *whole.attention[0].outputs)}),
            "labels": (),
            "predict": Graph(file="predict.onnx", inputs=("hidden",), outputs=("logits",)),
        }
    )


def fake_predictions(source_ids: Sequence[int], vocabulary: int) -> NDArray[np.float32]:
    """Return the expected logits (S, V) of tokens of a FakeRunner for a source."""
    hidden = np.array(source_ids, np.float32)[:, None] * np.arange(1, HIDDEN + 1, dtype=np.float32)
    return np.asarray(hidden @ fake_table(vocabulary).T, np.float32)


def fake_slots_manifest(name: str = "fake-slots", slots: int = 3, **sizes: Any) -> Manifest:
    """Return a manifest with additional Linformer maps; its encoder maps are not normalized."""
    whole = fake_manifest(name, **sizes)
    of_tokens, *others = whole.attention
    outputs = tuple(f"encoder_slots_attention_{layer}" for layer in range(of_tokens.layers))
    of_slots = of_tokens.model_copy(update={"kind": "encoder_slots", "outputs": outputs, "columns": slots})
    return whole.model_copy(
        update={
            "encoder": whole.encoder_graph.model_copy(update={"outputs": (*whole.encoder_graph.outputs, *outputs)}),
            "attention": (of_tokens.model_copy(update={"normalized": False}), of_slots, *others),
        }
    )


def fake_label_logits(source_ids: Sequence[int], num_labels: int = len(LABELS)) -> NDArray[np.float32]:
    """Return the expected logits (C,) of the labels of a FakeRunner for a source."""
    return np.array([sum(source_ids) * (position + 2) % 7 - 3 for position in range(num_labels)], np.float32)


def fake_label_logprobs(source_ids: Sequence[int], num_labels: int = len(LABELS)) -> NDArray[np.float32]:
    """Return the expected label log-probabilities (C,) of a FakeRunner for a source."""
    logits = fake_label_logits(source_ids, num_labels)
    logprobs: NDArray[np.float32] = logits - np.log(np.exp(logits).sum())
    return logprobs


def fake_token_label_logprobs(source_ids: Sequence[int], num_labels: int = len(LABELS)) -> NDArray[np.float32]:
    """Return the expected label log-probabilities (S, C) of the tokens of a source."""
    return np.stack([fake_label_logprobs([token_id], num_labels) for token_id in source_ids])


def fake_table(vocabulary: int) -> NDArray[np.float32]:
    """Return the embeddings (V, M) of a FakeRunner."""
    positions = np.arange(1, vocabulary + 1)[:, None] * np.arange(1, HIDDEN + 1)
    return (positions * 40503 % PRIME / PRIME - 0.5).astype(np.float32)


@dataclass(frozen=True)
class Faults:
    """Injected faults; none by default. Calls are counted from 1."""

    encode_calls: frozenset[int] = frozenset()  # calls of `run_encoder` that raise
    step_calls: frozenset[int] = frozenset()  # calls of `step` that raise
    prefill_calls: frozenset[int] = frozenset()  # calls of `prefill` that raise
    raising_id: int | None = None  # `run_encoder` and `prefill` raise for inputs with this token
    nan_id: int | None = None  # all results for inputs with this token are NaN
    hang: threading.Event | None = None  # `step` waits for it


class FakeFaultError(RuntimeError):
    """An injected fault."""


class FakeRunner:
    """A Runner for tests and demonstrations."""

    def __init__(
        self,
        manifest: Manifest,
        max_rows: int,
        *,
        faults: Faults | None = None,
        num_prefix_blocks: int = 0,
        encode_s: float = 0.0,
        step_s: float = 0.0,
    ) -> None:
        """Create a runner.

        `encode_s` and `step_s` are the durations of each call in seconds; prefill takes `encode_s`.
        """
        self._manifest = manifest
        self._max_rows = max_rows
        self._faults = faults or Faults()
        self._encode_s = encode_s
        self._step_s = step_s
        limits = manifest.limits
        self._source = np.full((max_rows, limits.max_source_tokens), GARBAGE, np.float32)
        self._read = np.full((max_rows, limits.max_target_tokens), GARBAGE, np.float32)
        self._hash = np.full((max_rows, 1), GARBAGE, np.float32)
        self._blocks = np.full((num_prefix_blocks, BLOCK_TOKENS), GARBAGE, np.float32)
        self._last_outputs: Mapping[str, Array] = {}
        self.num_encodes = 0
        self.num_encoded = 0  # sources
        self.num_prefills = 0
        self.num_steps = 0
        self.num_releases = 0
        self.script: Sequence[int] = ()  # most likely tokens of all sequences, instead of those by a hash
        self.is_terminated = threading.Event()

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def max_rows(self) -> int:
        return self._max_rows

    @property
    def num_prefix_blocks(self) -> int:
        return len(self._blocks)

    def run_encoder(self, source_ids: Int64, source_lengths: Int32, outputs: Sequence[str]) -> Mapping[str, Array]:
        self.num_encodes += 1
        self.num_encoded += len(source_ids)
        if self._encode_s:
            time.sleep(self._encode_s)
        is_real = np.arange(source_ids.shape[1]) < source_lengths[:, None]  # (B, S)
        if self.num_encodes in self._faults.encode_calls or np.any(is_real & (source_ids == self._faults.raising_id)):
            raise FakeFaultError("encode")
        state = np.where(is_real, source_ids, GARBAGE).astype(np.float32)
        state[is_real & (source_ids == self._faults.nan_id)] = np.nan
        hidden = state[:, :, None] * np.arange(1, HIDDEN + 1, dtype=np.float32)  # (B, S, M)
        hashes = [[_rolling_hash(ids[: length - 1])] for ids, length in zip(source_ids, source_lengths, strict=True)]
        available: dict[str, Array] = {
            "hidden": hidden,
            "source_state": state,
            "hash_state": np.array(hashes, np.float32),
        }
        if "encoder_attention_0" in outputs:
            rows, columns = is_real[:, :, None], is_real[:, None, :]
            available |= self._maps("encoder", source_ids[:, None, :] + source_ids[:, :, None], rows & columns)
        if "encoder_slots_attention_0" in outputs:
            positions = np.arange(self._manifest.attention_of("encoder_slots").columns or 0)
            rows = np.broadcast_to(is_real[:, :, None], (*is_real.shape, len(positions)))
            available |= self._maps("encoder_slots", source_ids[:, :, None] + positions, rows)
        label_output = LABEL_OUTPUTS[self._manifest.label_kind]
        if label_output in outputs:
            available[label_output] = self._labels(source_ids, is_real, np.isnan(state))
        if LABEL_LOGITS in outputs and label_output != LABEL_LOGITS:
            sources = [row[real].tolist() for row, real in zip(source_ids, is_real, strict=True)]
            available[LABEL_LOGITS] = np.stack([fake_label_logits(ids, len(self._manifest.labels)) for ids in sources])
        return {name: available[name] for name in outputs}

    def _labels(self, source_ids: Int64, is_real: NDArray[np.bool_], is_nan: NDArray[np.bool_]) -> Array:
        num_labels = len(self._manifest.labels)
        sources = [row[real].tolist() for row, real in zip(source_ids, is_real, strict=True)]
        if self._manifest.label_kind in TOKEN_LABEL_KINDS:
            scores = np.full((*source_ids.shape, num_labels), GARBAGE, np.float32)
            for row, source in enumerate(sources):
                scores[row, : len(source)] = fake_token_label_logprobs(source, num_labels)
        else:
            compute = fake_label_logprobs if self._manifest.label_kind == "classes" else fake_label_logits
            scores = np.stack([compute(source, num_labels) for source in sources])
        scores[is_nan.any(axis=1)] = np.nan
        return scores

    def predict(self, hidden: Array) -> Array:
        logits: Array = hidden @ fake_table(self._manifest.limits.vocabulary).T
        return logits

    def measure_contributions(self, method: str, source_ids: Int64, target_ids: Int64) -> Mapping[str, Array]:
        raise FakeFaultError("contributions")  # its manifest has no such graph

    def init_rows(
        self,
        first: int,
        encoded: Mapping[str, Array],
        examples: Sequence[int],
        visible: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        for row, example in enumerate(examples, first):
            self._source[row] = GARBAGE
            self._read[row] = 0.0
            self._hash[row] = 0.0
            if not self._manifest.is_decoder_only:
                source = encoded["source_state"][example]
                if visible and example in visible:
                    source = source[list(visible[example])]
                self._source[row, : len(source)] = source

    def prefill(self, row: int, token_ids: Int64, length: int, outputs: Sequence[str] = ()) -> Mapping[str, Array]:
        self.num_prefills += 1
        if self._encode_s:
            time.sleep(self._encode_s)
        if self.num_prefills in self._faults.prefill_calls or np.any(token_ids == self._faults.raising_id):
            self._read[row, length : length + len(token_ids)] = GARBAGE
            raise FakeFaultError("prefill")
        if np.any(token_ids == self._faults.nan_id):
            raise FloatingPointError("a state is not finite")
        self._read[row, length : length + len(token_ids)] = token_ids
        for token_id in token_ids.tolist():
            self._hash[row] = _hash_of_next(int(self._hash[row, 0]), token_id)
        hidden = token_ids[:, None] * np.arange(1, HIDDEN + 1, dtype=np.float32)  # (S, M)
        available: dict[str, Array] = {"hidden": hidden.astype(np.float32)}
        if "decoder_attention_0" in outputs:
            read = np.broadcast_to(self._read[row].astype(np.int64), (1, len(token_ids), self._read.shape[1]))
            is_real = np.arange(read.shape[2]) <= length + np.arange(len(token_ids))[:, None]  # (S, columns)
            maps = self._maps("decoder", read, is_real[None])
            available |= {name: array[0][:, None] for name, array in maps.items()}  # (H, 1, S, columns)
        if "top_ids" in outputs:
            last = np.array([length + len(token_ids) - 1])
            available |= {name: array[0] for name, array in self._scores(np.array([row]), last, last + 1).items()}
        return {name: available[name] for name in outputs}

    def store_prefix(self, row: int, first_token: int, block: int) -> None:
        self._blocks[block] = self._read[row, first_token : first_token + BLOCK_TOKENS]

    def load_prefix(self, block: int, row: int, first_token: int) -> None:
        num_read = first_token + BLOCK_TOKENS
        self._read[row, first_token:num_read] = self._blocks[block]
        self._hash[row] = _rolling_hash(self._read[row, :num_read].astype(int).tolist())

    def swap(self, first: int, second: int, target_tokens: int) -> None:
        for state in (self._read, self._hash):
            state[[first, second]] = state[[second, first]]
        self._read[[first, second], target_tokens:] = GARBAGE

    def move(self, source: int, target: int, target_tokens: int, source_tokens: int) -> None:
        for state in (self._source, self._read, self._hash):
            state[target] = GARBAGE
        self._source[target, :source_tokens] = self._source[source, :source_tokens]
        self._read[target, :target_tokens] = self._read[source, :target_tokens]
        self._hash[target] = self._hash[source]
        for state in (self._source, self._read, self._hash):
            state[source] = GARBAGE

    def fork(self, sources: Sequence[int], targets: Sequence[int], positions: Sequence[slice]) -> None:
        for source, target, part in zip(sources, targets, positions, strict=True):
            self._read[target, part] = self._read[source, part]
            self._read[target, part.stop :] = GARBAGE
            self._hash[target] = self._hash[source]

    def step(
        self,
        token_ids: Int64,
        lengths: Int32,
        source_lengths: Int32,
        outputs: Sequence[str],
        *,
        first: int = 0,
        whole: Bools | None = None,
    ) -> Mapping[str, Array]:
        self.num_steps += 1
        for output in self._last_outputs.values():
            output.fill(GARBAGE)  # results of a step are valid until the next step
        if self._step_s:
            time.sleep(self._step_s)
        if self._faults.hang is not None:
            self._faults.hang.wait()
        rows = np.arange(first, first + len(token_ids))
        if self.num_steps in self._faults.step_calls:
            self._read[rows, lengths] = GARBAGE  # a kernel that fails may leave partial results
            raise FakeFaultError("step")
        self._read[rows, lengths] = token_ids
        self._hash[rows, 0] = _hash_of_next(self._hash[rows, 0].astype(np.int64), token_ids)
        available = self._scores(rows, lengths, source_lengths)
        if "cross_attention_0" in outputs:
            available |= self._step_maps("cross", self._source[rows] + lengths[:, None], source_lengths)
        if "decoder_attention_0" in outputs:
            available |= self._step_maps("decoder", self._read[rows], lengths + 1)
        given = {name: available[name] for name in outputs}
        self._last_outputs = {name: array for name, array in given.items() if "attention" not in name}
        return given

    def release_memory(self) -> None:
        self.num_releases += 1
        for state in (self._source, self._read, self._hash):
            state.fill(GARBAGE)

    def terminate(self) -> None:
        self.is_terminated.set()

    def _scores(self, rows: NDArray[np.intp], lengths: Int32, source_lengths: Int32) -> dict[str, Array]:
        """Return the scores of the tokens after those at the positions `lengths`."""
        if self._manifest.is_decoder_only:  # the prompt is the source
            for row, size in zip(rows, source_lengths, strict=True):
                self._source[row, :size] = self._read[row, :size]
        logits = self._logits(rows, lengths, source_lengths)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        top_ids = np.argsort(-logits, axis=1, kind="stable")[:, :TOP_TOKENS]
        return {
            "logits": logits,
            "logprobs": logprobs,
            "top_logprobs": np.take_along_axis(logprobs, top_ids, axis=1),
            "top_ids": top_ids,
        }

    def _logits(self, rows: NDArray[np.intp], lengths: Int32, source_lengths: Int32) -> NDArray[np.float32]:
        """Return logits (B, V): noise from a hash of the row's tokens, with one clear maximum."""
        source_hash = _weighted_sum(self._source[rows], source_lengths)
        key = (
            source_hash * 13 + _weighted_sum(self._read[rows], lengths + 1) * 17 + self._hash[rows, 0].astype(np.int64)
        ) % PRIME
        tokens = self._manifest.tokens
        vocabulary = self._manifest.limits.vocabulary
        noise = (key[:, None] * np.arange(1, vocabulary + 1) * 40503 % PRIME) / PRIME * 4.0
        num_filled = source_lengths - 1 if self._manifest.is_decoder_only else len(tokens.start_ids) - 1
        is_over = lengths - num_filled >= _target_length(source_hash)
        best = np.where(is_over, tokens.end_id, 3 + key % (vocabulary - 3))
        if self.script:
            best = np.array(self.script)[np.minimum(lengths - num_filled, len(self.script) - 1)]
        logits: NDArray[np.float32] = noise.astype(np.float32)
        logits[np.arange(len(rows)), best] = 6.0
        is_poisoned = np.isnan(self._source[rows]).any(axis=1)
        logits[is_poisoned] = np.nan
        return logits

    def _step_maps(self, kind: str, state: Array, lengths: Int32) -> dict[str, Array]:
        is_real = np.arange(state.shape[1]) < lengths[:, None]
        tokens = np.nan_to_num(state).astype(np.int64)
        return self._maps(kind, tokens[:, None, :], is_real[:, None, :])

    def _maps(self, kind: str, tokens: Int64, is_real: NDArray[np.bool_]) -> dict[str, Array]:
        """Return maps (B, heads, rows, columns) that differ by layer and head; rows sum to 1."""
        attention = self._manifest.attention_of(kind)
        heads = np.arange(attention.heads)[:, None, None]
        maps: dict[str, Array] = {}
        for layer, name in enumerate(attention.outputs):
            weights = 1 + (tokens[:, None] + 3 * heads + 5 * layer) % 7  # (B, heads, rows, columns)
            weights = np.where(is_real[:, None], weights, 0).astype(np.float32)
            sums = np.maximum(weights.sum(axis=-1, keepdims=True), 1)
            maps[name] = np.where(is_real[:, None], weights / sums, np.float32(GARBAGE))
        return maps

    def expected(self, source_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """Return the expected result of greedy decoding, computed without rows or batches."""
        tokens, vocabulary = self._manifest.tokens, self._manifest.limits.vocabulary
        source_hash = sum(position * token for position, token in enumerate(source_ids, 1)) % PRIME
        read = list(self._manifest.decoder_prompt_ids(source_ids))
        num_filled, rolling = len(read) - 1, _rolling_hash(read)
        while len(read) - num_filled <= max_new_tokens and tokens.end_id not in read[num_filled + 1 :]:
            read_hash = sum(position * token for position, token in enumerate(read, 1)) % PRIME
            key = (source_hash * 13 + read_hash * 17 + rolling) % PRIME
            is_over = len(read) - num_filled > int(_target_length(np.int64(source_hash)))
            read.append(tokens.end_id if is_over else 3 + key % (vocabulary - 3))
            rolling = _hash_of_next(rolling, read[-1])
        return read[num_filled + 1 :]


def _weighted_sum(values: Array, lengths: Int32) -> Int64:
    """Return (B,): the sum of the first `lengths` values of (B, N), weighted by position from 1."""
    positions = np.arange(1, values.shape[1] + 1)
    is_counted = (positions <= lengths[:, None]) & np.isfinite(values)
    return np.where(is_counted, values, 0).astype(np.int64) @ positions % PRIME


def _hash_of_next(read: Any, token: Any) -> Any:
    """Return the hash after one more token."""
    return (read * 31 + token + 7) % PRIME


def _rolling_hash(ids: Iterable[int]) -> int:
    return int(reduce(_hash_of_next, ids, 0))


def _target_length(source_hash: Any) -> Any:
    """Return the length of a target, 2 to 12, so that rows end at different times."""
    return 2 + source_hash % 11
