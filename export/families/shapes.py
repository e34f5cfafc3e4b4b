"""Comparison of the tensors of a checkpoint with those that a description implies."""

from collections.abc import Iterator

from sightline.export.families.description import Attention, Description, Norm, Stack
from sightline.export.families.weights import Weights
from sightline.export.import_errors import ImportFailedError

# Name of a tensor in `sightline.export.families.weights` and its shape, None for a tensor that must
# be absent.
Expected = Iterator[tuple[str, tuple[int, ...] | None]]


def check_shapes(model: Description, weights: Weights, configuration: str = "config.json") -> None:
    """Check that a checkpoint has the tensors that its description implies, without reading them.

    A bias that the description excludes is an error. Other tensors that it does not imply are left
    to `Tensors.check_all_read`. `configuration` is the name of the configuration in errors.
    """
    for name, shape in _model(model, weights):
        source = weights.find(name)
        if callable(source):
            continue  # it is computed from the description
        if shape is None:
            tensors = weights.tensors
            if source is not None and source[1] in tensors:
                raise ImportFailedError(
                    f"the checkpoint has a tensor {source[1]!r}, but its architecture and {configuration} exclude this "
                    "bias; its configuration may belong to another checkpoint"
                )
            continue
        assert source is not None, f"the family names the module of {name}"
        part, tensor = source
        if min(shape) < 1:
            raise ImportFailedError(
                f"{configuration} implies the shape {list(shape)} of the tensor {tensor!r}; sizes must be at "
                "least 1: correct it, or download it again"
            )
        stored, expected = weights.tensors.shape(tensor), part.stored_shape(shape)
        if stored != expected:
            raise ImportFailedError(
                f"the tensor {tensor!r} has the shape {list(stored)}, but {configuration} implies {list(expected)}; "
                "its configuration may belong to another checkpoint"
            )


def _model(model: Description, weights: Weights) -> Expected:
    decoder = model.decoder if model.reader is None else model.reader.stack
    stacks = {"encoder": model.encoder, "decoder": decoder}
    for name, stack in stacks.items():
        if stack is not None:
            yield from _embedding(name, stack, model, weights)
            for number, attention in enumerate(stack.attention):
                yield from _layer(f"{name}.{number}", stack, attention, model.encoder, is_first=number == 0)
            if stack.has_final_norm:
                yield from _norm(f"{name}.norm", stack.width, stack.norm)
            if stack.projected_to is not None:
                yield from _linear(f"{name}.output_projection", stack.projected_to, stack.width, has_bias=False)
    last = model.decoder or model.encoder
    assert last is not None, "a model has an encoder or a decoder"
    for output, shape in (
        ("output.weight", (model.vocabulary, last.output_size)),
        ("output.bias", (model.vocabulary,)),
    ):
        if output in weights:  # else the projection is the table of embeddings, without a bias
            yield output, shape
    if model.head is not None:
        if model.head.activation is not None:
            yield from _linear("head.dense", last.output_size, last.output_size, model.head.has_bias)
        if model.head.has_norm:
            yield from _norm("head.norm", last.output_size, last.norm)
        yield from _linear("head.output", len(model.labels), last.output_size, model.head.has_output_bias)
    if model.predictions is not None:
        size = model.predictions.size
        yield from _linear("prediction.dense", size, last.output_size, model.predictions.has_bias)
        yield from _norm("prediction.norm", size, last.norm)
        yield from _linear("prediction.output", model.vocabulary, size, model.predictions.has_output_bias)


def _embedding(name: str, stack: Stack, model: Description, weights: Weights) -> Expected:
    options, size, vocabulary = stack.embedding, stack.width, model.vocabulary
    if options.projected_from is not None:
        size = options.projected_from
        yield from _linear(f"{name}.embedding_projection", stack.width, size, not options.projects_tokens)
    if name == "encoder" and model.source_vocabulary is not None:
        vocabulary = model.source_vocabulary
    is_shared = weights.find("embedding.weight") is not None
    yield "embedding.weight" if is_shared else f"{name}.embedding.weight", (vocabulary, size)
    size = stack.width if options.projects_tokens else size
    if options.has_positions:
        yield f"{name}.positions.weight", (model.max_positions + options.position_offset, size)
    if options.types:
        yield f"{name}.types.weight", (options.types, size)
    if options.has_norm:
        yield from _norm(f"{name}.embedding_norm", size, stack.norm)
    if stack.relative_bias is not None:
        yield f"{name}.relative_bias.weight", (stack.relative_bias.buckets, stack.attention[0].heads)
    if stack.disentangled is not None:
        yield f"{name}.relative.weight", (2 * stack.disentangled.span, stack.width)
        if stack.disentangled.has_norm:
            yield from _norm(f"{name}.relative_norm", stack.width, stack.norm)
    if stack.convolution is not None:
        yield f"{name}.convolution.weight", (stack.width, stack.width, stack.convolution.size)
        yield f"{name}.convolution.bias", (stack.width,)
        yield from _norm(f"{name}.convolution_norm", stack.width, stack.norm)


def _layer(layer: str, stack: Stack, attention: Attention, encoder: Stack | None, *, is_first: bool) -> Expected:
    width, options = stack.width, stack.feed_forward
    if stack.cell == "ssru":
        yield from _linear(f"{layer}.cell.forget", width, width)
        yield from _linear(f"{layer}.cell.input", width, width, has_bias=False)
    else:
        yield from _attention(f"{layer}.self_attention", attention, width, width)
    for part in () if stack.disentangled is None else stack.disentangled.projections:
        yield from _linear(f"{layer}.self_attention.{part}", attention.heads * attention.head_size, width)
    if stack.norm_place != "none" and not (is_first and stack.skips_first_norm):
        yield from _norm(f"{layer}.self_attention_norm", width, stack.norm)
    if stack.cross is not None and encoder is not None:
        yield from _attention(f"{layer}.cross_attention", stack.cross, width, encoder.width)
        yield from _norm(f"{layer}.cross_attention_norm", width, stack.norm)
    for part in ("gate", "inner") if options.gated else ("inner",):
        yield from _linear(f"{layer}.feed_forward.{part}", options.size, width, options.has_bias)
    has_output_bias = options.has_bias if options.has_output_bias is None else options.has_output_bias
    yield from _linear(f"{layer}.feed_forward.outer", width, options.size, has_output_bias)
    if stack.norm_place != "none":
        yield from _norm(f"{layer}.feed_forward_norm", width, stack.norm)
    for sublayer in ("self_attention", "feed_forward") if stack.has_output_norms else ():
        yield from _norm(f"{layer}.{sublayer}_output_norm", width, stack.norm)


def _attention(module: str, options: Attention, width: int, memory: int) -> Expected:
    """Yield the tensors of attention from vectors of `width` to those of a memory."""
    if options.has_projections:
        queries, keys = options.heads * options.head_size, options.kv_heads * options.head_size
        yield from _linear(f"{module}.query", queries, width, options.has_bias)
        yield from _linear(f"{module}.key", keys, memory, options.has_bias)
        yield from _linear(f"{module}.value", keys, memory, options.has_bias)
        yield from _linear(f"{module}.output", width, queries, options.has_output_bias)
    if options.relative_keys is not None:
        yield f"{module}.relative_keys.weight", (2 * options.relative_keys.span + 1, options.head_size)
    if options.head_norm is not None:
        queries, keys = (options.heads, options.kv_heads) if options.joins_heads else (1, 1)
        yield from _norm(f"{module}.query_norm", queries * options.head_size, options.head_norm)
        yield from _norm(f"{module}.key_norm", keys * options.head_size, options.head_norm)


def _linear(module: str, outputs: int, inputs: int, has_bias: bool = True) -> Expected:
    yield f"{module}.weight", (outputs, inputs)
    yield f"{module}.bias", (outputs,) if has_bias else None


def _norm(module: str, size: int, options: Norm) -> Expected:
    yield f"{module}.weight", (size,)
    yield f"{module}.bias", (size,) if options.kind == "layer" and options.has_bias else None
