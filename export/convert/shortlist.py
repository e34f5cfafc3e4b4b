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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from sightline.base.bundle import TOP_TOKENS, AgreementQuality, BundleError, Shortlist, State
from sightline.base.bundle_files import read_bundle, write_manifest
from sightline.export.check.sessions import Sessions, open_sessions
from sightline.export.convert.conversions import measure, write_rewritten
from sightline.export.convert.products import attributes_of
from sightline.export.convert.text_quality import PlainText, batches, greedy_outputs
from sightline.export.graphs.builder import GraphBuilder, WeightFile, external_tensor
from sightline.export.graphs.nodes import FLOAT, INT32, INT64, LOWEST, SCORES, token_mask
from sightline.export.import_errors import VerificationError
from sightline.export.options import MIN_CHRF
from sightline.export.sources.firefox.shortlist import Candidates
from sightline.export.writing import clear_disk_errors, replacing

SIZE = 1024  # most candidates of a source
# Candidates of all sources and of each source token in a shortlist that is learned, and number of
# source tokens that a step is linked with.
NUM_FREQUENT, NUM_BEST, NUM_LINKS = 400, 40, 3
WHOLE, IDS = "whole_vocabulary", "shortlist.ids"
PRODUCTS = ("Gemm", "MatMulInteger")

Array = NDArray[Any]


def shortlist_bundle(
    source: Path, bundle: Path, candidates: Callable[[], Candidates], text: PlainText | None, size: int = SIZE
) -> Shortlist:
    """Add a shortlist to a bundle of a translation model, and measure its loss on texts.

    The candidates are requested after the bundle was checked.

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
    vocabulary, states = original.limits.vocabulary, list[State]()
    record = Shortlist(size=min(size, vocabulary))

    def rewrite(models: Sequence[onnx.ModelProto], source: Path, weights: WeightFile) -> list[onnx.ModelProto]:
        product, chosen = _find_product(models[1].graph, source, vocabulary), candidates()
        for tensor in (tensor for model in models for tensor in model.graph.initializer):
            if tensor.data_location == TensorProto.EXTERNAL:
                tensor.CopyFrom(external_tensor(tensor.name, numpy_helper.to_array(tensor, str(source)), weights))
        states.extend(_select(models[0].graph, chosen, product, weights, record.size))
        _shorten(models[1].graph, product, states, weights, vocabulary)
        return list(models)

    with clear_disk_errors(bundle), replacing(bundle) as folder:
        changes = write_rewritten(source, original, folder, rewrite)
        changes |= {"states": (*original.states, *states), "shortlist": record, "created": int(time.time())}
        manifest = original.model_copy(update=changes)
        if text is not None:
            quality = measure(source, original, open_sessions(folder, manifest), text, force=True)
            assert isinstance(quality, AgreementQuality), "the bundle is an encoder-decoder"
            if not quality.chrf >= MIN_CHRF:
                raise VerificationError(
                    f"the outputs with the shortlist have a chrF of {quality.chrf:.1f} with those without it, but at "
                    f"least {MIN_CHRF:g} is required; make it from more texts, or serve the bundle without a shortlist"
                )
            record = record.model_copy(update={"quality": quality})
        write_manifest(folder, manifest.model_copy(update={"shortlist": record}))
    return record


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


@dataclass(frozen=True, eq=False)
class _Product:
    """The product with the vocabulary, and the nodes that make logits of it."""

    nodes: Sequence[NodeProto]  # in the order of the graph; the product comes first
    tables: Mapping[str, Array]  # constants of tokens, by name: the matrix (V, K), then others (V,)
    features: Sequence[str]  # values that the nodes read, one row for each row of the batch

    def copy(self, graph: GraphBuilder, names: Mapping[str, str]) -> str:
        """Add the nodes with other names of their inputs, and return the name of the logits.

        A matrix with another name is (B, K, C): each row has its own.
        """
        names, axis = dict(names), graph.constant([1], np.int64)
        for node in self.nodes:
            inputs, biases = [names.get(name, name) for name in node.input], list[str]()
            attributes = attributes_of(node)
            op, is_own = node.op_type, node.op_type in PRODUCTS and inputs[1] != node.input[1]
            if is_own:
                inputs[0] = graph.add("Unsqueeze", inputs[0], axis)
                if op == "Gemm":
                    op, attributes, inputs, biases = "MatMul", {}, inputs[:2], inputs[2:]
            result = graph.add(op, *inputs, **attributes)
            result = graph.add("Squeeze", result, axis) if is_own else result
            names[node.output[0]] = graph.add("Add", result, *biases) if biases else result
        return names["logits"]


def _find_product(graph: GraphProto, folder: Path, vocabulary: int) -> _Product:
    constants = {tensor.name: tensor for tensor in graph.initializer}
    places = [i for i, node in enumerate(graph.node) if node.op_type in PRODUCTS and node.input[1] in constants]
    if len(places) != 1:
        raise BundleError(
            f"{folder} cannot have a shortlist: its product with the vocabulary must be float32 or quantized per "
            "token; use the float32 bundle, which imports write with --bits 32, or convert that with `sightline "
            "quantize --bits 8 --projection per-token`"
        )
    last = next(i for i, node in enumerate(graph.node) if "logits" in node.output)
    nodes = graph.node[places[0] : last + 1]
    made = {node.output[0] for node in nodes} | {""}
    read = dict.fromkeys(name for node in nodes for name in node.input if name not in made)
    arrays = {name: numpy_helper.to_array(constants[name], str(folder)) for name in read if name in constants}
    arrays = {name: array for name, array in arrays.items() if vocabulary in array.shape}
    if nodes[0].op_type != "Gemm":
        arrays[nodes[0].input[1]] = arrays[nodes[0].input[1]].T
    return _Product(nodes, arrays, [name for name in read if name not in constants])


def _extend(graph: GraphProto, builder: GraphBuilder) -> None:
    added, known = builder.build().graph, {tensor.name for tensor in graph.initializer}
    graph.node.extend(added.node)
    graph.input.extend(added.input)
    graph.output.extend(added.output)
    graph.initializer.extend(tensor for tensor in added.initializer if tensor.name not in known)


def _select(
    graph: GraphProto, candidates: Candidates, product: _Product, weights: WeightFile, size: int
) -> list[State]:
    """Add the candidates of each source to an encoder graph, and return the states that hold them.

    Their ids ascend. -1 fills the list, and a list of -1 stands for more candidates than fit.
    """
    added = GraphBuilder("encoder", weights, "shortlist.")
    axis, none = added.constant([1], np.int64), added.constant(-1, np.int32)
    batch = added.add("Shape", "source_ids", end=1)
    width = added.add("Squeeze", added.add("Shape", "source_ids", start=1))
    _, is_token = token_mask(added, added.add("Cast", "source_lengths", to=INT64), width)
    is_token = added.add("Unsqueeze", is_token, added.constant([2], np.int64))  # (B, S, 1)
    frequent = added.weight("shortlist.frequent", candidates.frequent[None].astype(np.int32))  # (1, F)
    by_source = added.weight("shortlist.by_source", candidates.by_source.astype(np.int32))
    likely = added.add("Gather", by_source, "source_ids")  # (B, S, N)
    likely = added.add("Where", is_token, likely, added.constant(int(candidates.frequent[0]), np.int32))
    likely = added.add("Reshape", likely, added.constant([0, -1], np.int64))
    always = added.add("Expand", frequent, added.add("Concat", batch, axis, axis=0))
    both = added.add("Concat", always, likely, axis=1)
    names = [added.unique(f"shortlist.{name}") for name in ("ascending", "order")]
    ids, _ = added.add_multi("TopK", [both, added.add("Shape", both, start=1)], names, largest=0)
    # Equal ids are neighbours and get the same place, from 1; all that do not fit get the last one.
    before = added.add("Pad", ids, added.constant([1, -1], np.int64), none, axis)
    is_new = added.add("Cast", added.add("Greater", ids, before), to=INT32)
    place = added.add("CumSum", is_new, added.constant(1, np.int64))
    place = added.add("Min", place, added.constant(size + 1, np.int32))
    empty = added.add("Expand", none, added.add("Concat", batch, added.constant([size + 2], np.int64), axis=0))
    places = added.add("ScatterElements", empty, place, ids, axis=1)
    first, last, end = (added.constant([bound], np.int64) for bound in (1, size + 1, size + 2))
    fits = added.add("Less", added.add("Slice", places, last, end, axis), added.constant(0, np.int32))
    ids = added.add("Where", fits, added.add("Slice", places, first, last, axis), none, output=IDS)
    states = list[State]()

    def keep(name: str, shape: tuple[int, ...], dtype: Any) -> None:
        added.output(name, helper.np_dtype_to_tensor_dtype(dtype), ("batch", *shape))
        states.append(State(input=name, init="encoder", encoder_output=name, shape=shape, dtype=dtype.name))

    keep(IDS, (size,), np.dtype(np.int32))
    for number, array in enumerate(product.tables.values()):
        name, table = f"shortlist.{number}", added.weight(f"shortlist.{number}.by_token", array)
        if array.ndim == 1:
            added.add("Gather", table, ids, output=name)  # -1 reads the last row, which is not used
        else:
            added.add("Transpose", added.add("Gather", table, ids), output=name, perm=[0, 2, 1])
        keep(name, (*array.shape[1:], size), array.dtype)
    _extend(graph, added)
    return states


def _shorten(
    graph: GraphProto, product: _Product, states: Sequence[State], weights: WeightFile, vocabulary: int
) -> None:
    """Score candidates in a decoder graph, and the vocabulary for rows that need it."""
    added, whole, none = (GraphBuilder(name, weights, f"{name}.") for name in ("shortlist", "whole", "none"))
    for state in states:
        added.input(state.input, helper.np_dtype_to_tensor_dtype(np.dtype(state.dtype)), ("batch", *state.shape))
    added.input(WHOLE, TensorProto.BOOL, ("batch",))
    count = min(TOP_TOKENS, vocabulary)

    def best(builder: GraphBuilder, logits: str) -> tuple[str, Sequence[str]]:
        logprobs = builder.add("LogSoftmax", logits, axis=-1)
        outputs = [builder.unique(f"{builder.prefix}{name}") for name in SCORES[2:]]
        return logprobs, builder.add_multi("TopK", [logprobs, builder.constant([count], np.int64)], outputs)

    own = dict(zip(product.tables, (state.input for state in states[1:]), strict=True))
    is_none = added.add("Less", IDS, added.constant(0, np.int32))
    logits = added.add("Where", is_none, added.constant(LOWEST, np.float32), product.copy(added, own))
    _, (top_logprobs, positions) = best(added, logits)
    top_ids = added.add("Cast", added.add("GatherElements", IDS, positions, axis=1), to=INT64)
    overflows = added.add("Gather", is_none, added.constant(0, np.int64), axis=1)
    needs_all = added.add("Or", WHOLE, overflows)
    any_needs = added.add("ReduceMax", added.add("Cast", needs_all, to=INT32), keepdims=0)
    any_needs = added.add("Cast", any_needs, to=TensorProto.BOOL)

    # The branch for rows that need the whole vocabulary, (N,), and the index of each row in them.
    first, axis = whole.constant([0], np.int64), whole.constant([1], np.int64)
    rows = whole.add("Squeeze", whole.add("NonZero", needs_all), first)
    logits = product.copy(whole, {name: whole.add("Gather", name, rows) for name in product.features})
    logprobs, top = best(whole, logits)
    column = whole.add("Unsqueeze", rows, axis)
    ranks = whole.add("CumSum", whole.add("Cast", needs_all, to=INT64), whole.constant(0, np.int64))
    has_marked = whole.add("ReduceMax", whole.add("Cast", WHOLE, to=INT64), first)  # (1,)
    index = whole.add("Tile", whole.add("Sub", ranks, axis), has_marked)  # no rows if none is marked
    no_rows = none.constant([0, vocabulary], np.int64)
    for name, values in zip(SCORES[:2], (logits, logprobs), strict=True):
        whole.add("Gather", values, index, output=whole.output(f"whole.{name}", FLOAT, ("batch", vocabulary)))
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
