"""Shortlists: a translation chooses its tokens from those that its source makes likely.

The product with the table of the vocabulary takes most of the time of a decoder step. With a
shortlist, the encoder graph looks up the candidates of each source and copies their columns of the
table into states, which never change. The decoder graph multiplies by these columns. It computes
the whole vocabulary only for rows that the input `whole_vocabulary` marks, and for rows whose
source has more candidates than fit.

The nodes for the candidates are a copy of those for the vocabulary. Products of integers are exact,
so that a candidate of a quantized bundle has the same logit as without a shortlist.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from sightline.base.bundle import TOP_TOKENS, AgreementQuality, BundleError, Manifest, Shortlist, State
from sightline.base.bundle_files import read_bundle, write_manifest
from sightline.export.check.sessions import Sessions, open_sessions
from sightline.export.convert.conversions import write_rewritten
from sightline.export.convert.text_quality import PlainText, batches, compare_on_texts, greedy_outputs
from sightline.export.graphs.builder import GraphBuilder, WeightFile, external_tensor
from sightline.export.graphs.nodes import FLOAT, INT32, INT64, LOWEST, SCORES, token_mask
from sightline.export.import_errors import VerificationError
from sightline.export.options import MIN_CHRF
from sightline.export.sources.firefox.shortlist import Candidates
from sightline.export.writing import clear_disk_errors, replacing
from sightline.model.data.tokenizer_training import read_tokenizer

SIZE = 1024  # most candidates of a source
# Candidates of all sources and of each source token in a shortlist that is learned, and number of
# source tokens that a step is linked with.
NUM_FREQUENT, NUM_BEST, NUM_LINKS = 400, 40, 3
WHOLE, IDS, COLUMNS = "whole_vocabulary", "shortlist.ids", "shortlist.columns"
PRODUCTS = ("Gemm", "MatMulInteger")
ELEMENTWISE = ("Add", "Cast", "Div", "Mul", "Tanh")  # nodes between the product and the logits

Array = NDArray[Any]


def shortlist_bundle(
    source: Path, bundle: Path, candidates: Candidates, text: PlainText | None, size: int = SIZE
) -> Shortlist:
    """Add a shortlist to a bundle of a translation model, and measure its loss on texts.

    Raises:
        VerificationError: the translations differ too much from those without a shortlist; nothing
            is written.
        BundleError: the bundle is damaged or cannot have a shortlist.
    """
    original = read_bundle(source)
    if original.encoder is None or original.decoder is None or original.dtype == "float16":
        raise BundleError(f"{source} cannot have a shortlist: only encoder-decoder models for the CPU can")
    if original.shortlist is not None:
        raise BundleError(f"{source} has a shortlist already; name the bundle that it was made from")
    with clear_disk_errors(bundle), replacing(bundle) as folder:
        manifest = _write(source, original, folder, candidates, min(size, original.limits.vocabulary))
        assert manifest.shortlist is not None
        if text is not None:
            before, after = open_sessions(source, original), open_sessions(folder, manifest)
            tokenizers = [
                read_tokenizer(source / name) for name in (original.source_tokenizer, original.target_tokenizer)
            ]
            quality = compare_on_texts(before, after, tokenizers[0], tokenizers[1], text)
            assert isinstance(quality, AgreementQuality), "the bundle is an encoder-decoder"
            if not quality.chrf >= MIN_CHRF:
                raise VerificationError(
                    f"the outputs with the shortlist have a chrF of {quality.chrf:.1f} with those without it, but at "
                    f"least {MIN_CHRF:g} is required; make it from more texts, or serve the bundle without a shortlist"
                )
            record = manifest.shortlist.model_copy(update={"quality": quality})
            manifest = manifest.model_copy(update={"shortlist": record})
        write_manifest(folder, manifest)
    assert manifest.shortlist is not None
    return manifest.shortlist


def learn_candidates(sessions: Sessions, sources: Sequence[Sequence[int]]) -> Candidates:
    """Translate sources, and collect the tokens that are probable where each source token is read.

    The heads that align words link each step with a source token.
    """
    manifest = sessions.manifest
    limits, (aligned, layer, heads) = manifest.limits, manifest.alignment_heads
    maps = manifest.attention_of("cross").outputs[0]
    weights, links = np.zeros(limits.vocabulary), dict[int, Counter[int]]()
    before: dict[str, Array] = {}

    def link(rows: Sequence[Sequence[int]], outputs: dict[str, Array], is_done: Sequence[bool]) -> None:
        nonlocal before
        written, before = outputs if aligned == "writes" else before, outputs
        attention = outputs[maps][:, list(heads), layer].mean(axis=1)  # (B, S)
        for row, source in enumerate(rows):
            if written and not is_done[row]:
                ids, shares = written["top_ids"][row], np.exp(written["top_logprobs"][row])
                weights[ids] += shares
                for place in np.argsort(-attention[row, : len(source)])[:NUM_LINKS].tolist():
                    of_token = links.setdefault(source[place], Counter())
                    of_token.update(dict(zip(ids.tolist(), (attention[row, place] * shares).tolist(), strict=True)))

    for indices in batches(sources):
        rows, before = [sources[index] for index in indices], {}
        greedy_outputs(sessions, rows, ["top_ids", "top_logprobs", maps], partial(link, rows))
    frequent = np.unique([*manifest.tokens.end_ids, *np.argsort(-weights, kind="stable")[:NUM_FREQUENT]])
    by_source = np.full((limits.source_vocabulary or limits.vocabulary, NUM_BEST + 1), frequent[0])
    if limits.source_vocabulary is None:  # names and numbers are often copied
        by_source[:, NUM_BEST] = np.arange(limits.vocabulary)
    for token, of_token in links.items():
        best = [target for target, _ in of_token.most_common(NUM_BEST)]
        by_source[token, : len(best)] = best
    return Candidates(frequent, by_source)


def _write(source: Path, original: Manifest, folder: Path, candidates: Candidates, size: int) -> Manifest:
    """Write all files but the manifest, which is returned without the measured loss."""
    limits, states = original.limits, list[State]()
    vocabulary = limits.vocabulary
    missing = (limits.source_vocabulary or vocabulary) - len(candidates.by_source)
    by_source = np.pad(candidates.by_source, [(0, missing), (0, 0)], constant_values=candidates.frequent[0])

    def rewrite(models: Sequence[onnx.ModelProto], source: Path, weights: WeightFile) -> list[onnx.ModelProto]:
        encoder, decoder = models[0].graph, models[1].graph
        product = _find_product(decoder, source, vocabulary)
        for model in models:
            kept = [_copied(tensor, source, weights) for tensor in model.graph.initializer]
            del model.graph.initializer[:]
            model.graph.initializer.extend(kept)
        states.extend(_shorten(decoder, product, weights, size, vocabulary))
        _select(encoder, Candidates(candidates.frequent, by_source), product, states, weights, size, vocabulary)
        return list(models)

    changes = write_rewritten(source, original, folder, rewrite)
    changes |= {"states": (*original.states, *states), "shortlist": Shortlist(size=size), "created": int(time.time())}
    return original.model_copy(update=changes)


def _copied(tensor: TensorProto, folder: Path, weights: WeightFile) -> TensorProto:
    if tensor.data_location != TensorProto.EXTERNAL:
        return tensor
    return external_tensor(tensor.name, numpy_helper.to_array(tensor, str(folder)), weights)


@dataclass(frozen=True, eq=False)
class _Product:
    """The product with the vocabulary, and the nodes that make logits of it."""

    nodes: Sequence[NodeProto]  # in the order of the graph; the product comes first
    rows: Array  # the table of the vocabulary (V, K)
    terms: Mapping[str, Array]  # other constants (V,), by name
    features: Sequence[str]  # values that the nodes read, one row for each row of the batch

    def copy(self, graph: GraphBuilder, names: Mapping[str, str], columns: str = "") -> str:
        """Add the nodes with other names of their inputs, and return the name of the logits.

        With `columns` (B, K, C), each row has its own table.
        """
        names = dict(names)
        for node in self.nodes:
            inputs = [names.get(name, name) for name in node.input]
            attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
            op, bias = node.op_type, ""
            if op in PRODUCTS and columns:
                axis = graph.constant([1], np.int64)
                row, _, *others = inputs
                if op == "Gemm":
                    op, attributes, others, bias = "MatMul", {}, [], "".join(others)
                products = graph.add(op, graph.add("Unsqueeze", row, axis), columns, *others, **attributes)
                result = graph.add("Squeeze", products, axis)
                result = graph.add("Add", result, bias) if bias else result
            else:
                result = graph.add(op, *inputs, **attributes)
            names[node.output[0]] = result
        return names["logits"]


def _find_product(graph: GraphProto, folder: Path, vocabulary: int) -> _Product:
    producers = {output: node for node in graph.node for output in node.output}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    found: set[str] = set()  # values over the vocabulary that are computed

    def is_over_vocabulary(value: str) -> bool:
        """Return True for a value (B, V) or a constant (V,), and add those before it to `found`."""
        node = producers.get(value)
        if node is None:
            return value in constants and tuple(constants[value].dims) == (vocabulary,)
        if node.op_type in PRODUCTS or (node.op_type in ELEMENTWISE and any([*map(is_over_vocabulary, node.input)])):
            found.add(value)
        return value in found

    is_over_vocabulary("logits")
    nodes = [node for node in graph.node if node.output[0] in found]
    products = [node for node in nodes if node.op_type in PRODUCTS and node.input[1] in constants]
    if len(products) != 1 or nodes[0] is not products[0]:
        raise BundleError(
            f"{folder} cannot have a shortlist: its product with the vocabulary must be float32 or quantized per "
            "token; quantize the float32 bundle with --projection per-token"
        )
    read = {
        name: numpy_helper.to_array(constants[name], str(folder))
        for node in nodes
        for name in node.input
        if name in constants
    }
    table = read[products[0].input[1]]
    terms = {name: array for name, array in read.items() if array.shape == (vocabulary,)}
    features = dict.fromkeys(name for node in nodes for name in node.input if name in producers and name not in found)
    return _Product(nodes, table if products[0].op_type == "Gemm" else table.T, terms, tuple(features))


def _state(name: str, shape: tuple[int, ...], dtype: Any) -> State:
    return State(input=name, init="encoder", encoder_output=name, shape=shape, dtype=np.dtype(dtype).name)


def _extend(graph: GraphProto, builder: GraphBuilder) -> None:
    added, known = builder.build().graph, {tensor.name for tensor in graph.initializer}
    graph.node.extend(added.node)
    graph.input.extend(added.input)
    graph.output.extend(added.output)
    graph.initializer.extend(tensor for tensor in added.initializer if tensor.name not in known)


def _shorten(
    graph: GraphProto, product: _Product, weights: WeightFile, size: int, vocabulary: int
) -> tuple[State, ...]:
    """Score candidates, and the vocabulary for rows that need it; return the states."""
    added, whole, none = (GraphBuilder(name, weights, f"{name}.") for name in ("shortlist", "whole", "none"))
    terms = {name: f"shortlist.{number}" for number, name in enumerate(product.terms)}
    states = [_state(IDS, (size,), np.int32), _state(COLUMNS, (product.rows.shape[1], size), product.rows.dtype)]
    states += [_state(terms[name], (size,), array.dtype) for name, array in product.terms.items()]
    for state in states:
        added.input(state.input, helper.np_dtype_to_tensor_dtype(np.dtype(state.dtype)), ("batch", *state.shape))
    added.input(WHOLE, TensorProto.BOOL, ("batch",))
    count = min(TOP_TOKENS, vocabulary)

    def best(builder: GraphBuilder, logits: str) -> tuple[str, Sequence[str]]:
        logprobs = builder.add("LogSoftmax", logits, axis=-1)
        outputs = [builder.unique(f"{builder.prefix}{name}") for name in SCORES[2:]]
        return logprobs, builder.add_multi("TopK", [logprobs, builder.constant([count], np.int64)], outputs)

    is_used = added.add("Less", IDS, added.constant(vocabulary, np.int32))
    logits = added.add("Where", is_used, product.copy(added, terms, COLUMNS), added.constant(LOWEST, np.float32))
    _, (top_logprobs, positions) = best(added, logits)
    top_ids = added.add("Cast", added.add("GatherElements", IDS, positions, axis=1), to=INT64)
    first_ids = added.add("Gather", IDS, added.constant(0, np.int64), axis=1)
    needs_all = added.add("Or", WHOLE, added.add("Less", first_ids, added.constant(0, np.int32)))
    any_needs = added.add(
        "Cast", added.add("ReduceMax", added.add("Cast", needs_all, to=INT32), keepdims=0), to=TensorProto.BOOL
    )

    # The branch for rows that need the whole vocabulary, (N,); `place` is the index of a row in it.
    first, axis = whole.constant([0], np.int64), whole.constant([1], np.int64)
    rows = whole.add("Squeeze", whole.add("NonZero", needs_all), first)
    logits = product.copy(whole, {name: whole.add("Gather", name, rows) for name in product.features})
    logprobs, top = best(whole, logits)
    column = whole.add("Unsqueeze", rows, axis)
    place = whole.add("CumSum", whole.add("Cast", needs_all, to=INT64), whole.constant(0, np.int64))
    has_whole = whole.add("ReduceMax", whole.add("Cast", WHOLE, to=INT64), first)  # (1,): 0 if all have overflowed
    count_whole = whole.add("Mul", has_whole, whole.add("Shape", WHOLE))
    place = whole.add("Slice", whole.add("Max", whole.add("Sub", place, axis), first), first, count_whole)
    no_rows = none.constant([0, vocabulary], np.int64)
    for name, values in zip(SCORES[:2], (logits, logprobs), strict=True):
        whole.add("Gather", values, place, output=whole.output(f"whole.{name}", FLOAT, ("batch", vocabulary)))
        none.add("ConstantOfShape", no_rows, output=none.output(f"none.{name}", FLOAT, ("batch", vocabulary)))
    for name, dtype, candidates, values in zip(SCORES[2:], (FLOAT, INT64), (top_logprobs, top_ids), top, strict=True):
        whole.add(
            "ScatterND", candidates, column, values, output=whole.output(f"whole.{name}", dtype, ("batch", count))
        )
        none.add("Identity", candidates, output=none.output(f"none.{name}", dtype, ("batch", count)))
    branches = {"then_branch": whole.build().graph, "else_branch": none.build().graph}
    added.add_multi("If", [any_needs], SCORES, **branches)

    replaced = {node.output[0] for node in product.nodes} | set(SCORES)
    kept = [node for node in graph.node if node.output[0] not in replaced]
    del graph.node[:]
    graph.node.extend(kept)
    _extend(graph, added)
    return tuple(states)


def _select(
    graph: GraphProto,
    candidates: Candidates,
    product: _Product,
    states: Sequence[State],
    weights: WeightFile,
    size: int,
    vocabulary: int,
) -> None:
    """Add the initial values of the states to an encoder graph: the candidates of each source.

    Their ids ascend. V fills the list, and a list of -1 stands for more candidates than fit.
    """
    added = GraphBuilder("encoder", weights, "shortlist.")
    axis = added.constant([1], np.int64)
    batch = added.add("Shape", "source_ids", end=1)
    width = added.add("Squeeze", added.add("Shape", "source_ids", start=1))
    _, is_token = token_mask(added, added.add("Cast", "source_lengths", to=INT64), width)
    frequent = added.weight("shortlist.frequent", candidates.frequent[None].astype(np.int32))  # (1, F)
    likely = added.add(
        "Gather", added.weight("shortlist.by_source", candidates.by_source.astype(np.int32)), "source_ids"
    )
    is_token = added.add("Unsqueeze", is_token, added.constant([2], np.int64))  # (B, S, 1)
    likely = added.add("Where", is_token, likely, added.constant(int(candidates.frequent[0]), np.int32))  # (B, S, K)
    likely = added.add("Reshape", likely, added.constant([0, -1], np.int64))
    always = added.add("Expand", frequent, added.add("Concat", batch, axis, axis=0))
    both = added.add("Concat", always, likely, axis=1)
    names = [added.unique(f"shortlist.{name}") for name in ("ascending", "order")]
    ids, _ = added.add_multi("TopK", [both, added.add("Shape", both, start=1)], names, largest=0)
    before = added.add("Pad", ids, added.constant([1, -1], np.int64), added.constant(-1, np.int32), axis)
    is_new = added.add("Not", added.add("Equal", ids, before))
    places = added.add("NonZero", is_new)  # (2, N): rows and columns
    row = added.add("Gather", places, added.constant(0, np.int64))
    counts = added.add("ReduceSum", added.add("Cast", is_new, to=INT64), axis, keepdims=0)  # (B,)
    starts = added.add("CumSum", counts, added.constant(0, np.int64), exclusive=1)
    number = added.add("Squeeze", added.add("Shape", row))
    numbers = added.add("Range", added.constant(0, np.int64), number, added.constant(1, np.int64))
    rank = added.add("Sub", numbers, added.add("Gather", starts, row))
    rank = added.add("Min", rank, added.constant(size - 1, np.int64))
    index = added.add("Concat", *(added.add("Unsqueeze", part, axis) for part in (row, rank)), axis=1)
    values = added.add("GatherND", ids, added.add("Transpose", places))
    shape = added.add("Concat", batch, added.constant([size], np.int64), axis=0)
    listed = added.add("ScatterND", added.add("Expand", added.constant(vocabulary, np.int32), shape), index, values)
    fits = added.add("Unsqueeze", added.add("LessOrEqual", counts, added.constant(size, np.int64)), axis)
    ids = added.add("Where", fits, listed, added.constant(-1, np.int32), output=IDS)
    for state, array in zip(states[1:], (product.rows, *product.terms.values()), strict=True):
        # V, and -1 in a list, read the last row, which is 0.
        by_token = np.concatenate([array, np.zeros_like(array[:1])])
        found = added.add("Gather", added.weight(f"{state.input}.by_token", by_token), ids)
        if state.input == COLUMNS:
            added.add("Transpose", found, output=COLUMNS, perm=[0, 2, 1])
        else:
            added.add("Identity", found, output=state.input)
    for state in states:
        added.output(state.input, helper.np_dtype_to_tensor_dtype(np.dtype(state.dtype)), ("batch", *state.shape))
    _extend(graph, added)
