"""Weights of a checkpoint by the names that the builder uses.

A module is named by its place in the model. `{}` is the number of a layer, STACK is `encoder` or
`decoder`. A module has `weight`, and `bias` if the checkpoint has one:

- `embedding`: the table of tokens (V, E); `STACK.embedding` if encoder and decoder differ
- `STACK.positions` (P, M), `STACK.types` (2, E), `STACK.embedding_norm`,
  `STACK.embedding_projection`
- `STACK.{}.self_attention.query`, `.key`, `.value`, `.output`, `.query_norm`, `.key_norm`, and
  `.relative_keys` (2 * span + 1, D), vectors of distances
- `STACK.{}.cross_attention.*`, the same
- `STACK.{}.self_attention_norm`, `.cross_attention_norm`, `.feed_forward_norm`
- `STACK.{}.self_attention_output_norm`, `.feed_forward_output_norm`
- `STACK.{}.feed_forward.inner`, `.gate`, `.outer`
- `STACK.{}.cell.forget`, `.cell.input` of a recurrent unit
- `STACK.relative_bias` (buckets, H), `STACK.norm`, `STACK.output_projection`
- `encoder.relative` (2 * span, M) and `encoder.relative_norm`, vectors of relative positions, and
  `encoder.{}.self_attention.relative_key`, `.relative_query`, their projections
- `encoder.convolution` (M, M, size), `encoder.convolution_norm`
- `encoder.projection.{}` (k, P), where `{}` is the number of the matrix
- `output`: projection to the vocabulary (V, M); `embedding` if there is none
- `head.dense`, `head.norm`, `head.output`
- `prediction.dense`, `prediction.norm`, `prediction.output` of a masked language model
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sightline.export.sources.opened_checkpoint import Tensors

Array = NDArray[np.float32]
QUERY_KEY_VALUE = ("query", "key", "value")  # projections of attention, in their usual order
_LAYER = re.compile(r"\.(\d+)(?=\.)")


@dataclass(frozen=True)
class AdaptedModule:
    """Module of a checkpoint that differs in form from that of the builder."""

    module: str
    transposed: bool = False  # the matrix is stored as (inputs, outputs)
    index: int = 0  # which of `count` equal parts along the outputs
    count: int = 1
    # Rows of the stored tensor in the order of the builder, if it has parts that are not equal, and
    # their number in the checkpoint.
    rows: tuple[int, ...] = ()
    stored_rows: int = 0
    skip: int = 0  # number of rows to omit at the start, such as positions that are never used
    added: tuple[float, ...] = ()  # values of rows to add at the end
    is_row: bool = False  # the vector is stored as a matrix (1, N)
    offset: float = 0.0  # is added to each stored value

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in the checkpoint of a tensor that has this shape in the builder."""
        rows = self.stored_rows or (shape[0] - len(self.added) + self.skip) * self.count
        if self.is_row:
            return 1, rows
        return (*reversed(shape[1:]), rows) if self.transposed else (rows, *shape[1:])

    def convert(self, stored: Array) -> Array:
        """Convert a tensor of the checkpoint to the form of the builder."""
        array = stored.reshape(-1) if self.is_row else stored
        array = array.T if self.transposed else array
        if self.count > 1:
            array = np.split(array, self.count)[self.index]
        array = array[list(self.rows)] if self.rows else array[self.skip :]
        for value in self.added:
            array = np.concatenate([array, np.full((1, *array.shape[1:]), value, np.float32)])
        if self.offset:
            array = array + np.float32(self.offset)
        return np.ascontiguousarray(array)


Computed = Callable[[], Array]  # a tensor that the checkpoint does not store
Source = str | AdaptedModule | Computed


def equal_parts(module: str, names: Sequence[str], stored: str, transposed: bool = False) -> dict[str, Source]:
    """Return the parts `names` of a module, whose outputs the checkpoint stores as one module."""
    return {
        f"{module}.{name}": AdaptedModule(stored, transposed, index, len(names)) for index, name in enumerate(names)
    }


_BERT_LAYER = (
    "attention.self.query attention.self.key attention.self.value attention.output.dense attention.output.LayerNorm "
    "intermediate.dense output.dense output.LayerNorm"
)
# Those of BART and OPT.
BART_LAYER = (
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj self_attn_layer_norm fc1 fc2 "
    "final_layer_norm"
)


def layer_modules(
    layer: str, names: str = _BERT_LAYER, stack: str = "encoder", number: int | str = "{}"
) -> dict[str, Source]:
    """Return the modules of a layer from their names in the checkpoint, by default those of BERT.

    They are query, key, value, output and normalization of the attention, and the inner and outer
    layer and normalization of the feed-forward network. "-" leaves one out.
    """
    attention, feed_forward = f"{stack}.{number}.self_attention", f"{stack}.{number}.feed_forward"
    ours = [f"{attention}.{part}" for part in (*QUERY_KEY_VALUE, "output")]
    ours += [f"{attention}_norm", f"{feed_forward}.inner", f"{feed_forward}.outer", f"{feed_forward}_norm"]
    return {name: f"{layer}.{theirs}" for name, theirs in zip(ours, names.split(), strict=True) if theirs != "-"}


class Weights:
    """Weights of a model by the names of this module."""

    def __init__(self, tensors: Tensors, modules: Mapping[str, Source]) -> None:
        """Create a view.

        `modules` has the module of the checkpoint for each module of the builder, both with `{}`
        for the number of a layer, or for one layer with its number. A name that ends in `.weight`
        or `.bias` stands for that tensor alone.
        """
        self.tensors = tensors
        self._modules = modules

    def __contains__(self, name: str) -> bool:
        source = self.find(name)
        return source is not None and (callable(source) or source[1] in self.tensors)

    def read(self, name: str) -> Array:
        """Return a tensor as float32, with matrices as (outputs, inputs).

        Raises `KeyError` if the table of the family has no such module.
        """
        source = self.find(name)
        if source is None:
            raise KeyError(name)
        if callable(source):
            return source()
        part, tensor = source
        return part.convert(self.tensors.read(tensor))

    def find(self, name: str) -> tuple[AdaptedModule, str] | Computed | None:
        """Return where a tensor is: its part of a tensor of the checkpoint, or a function.

        None if the table of the family has no such module. The checkpoint may lack the tensor.
        """
        number = next(iter(_LAYER.findall(name)), "")
        pattern = _LAYER.sub(".{}", name, count=1)
        # A tensor precedes its module, and an entry of one layer precedes that of all layers.
        for key in (name, pattern, name.rpartition(".")[0], pattern.rpartition(".")[0]):
            source = self._modules.get(key)
            if source is not None:
                break
        else:
            return None
        suffix = "" if key in (name, pattern) else f".{name.rpartition('.')[2]}"
        if callable(source):
            return source if suffix in ("", ".weight") else None
        part = AdaptedModule(source) if isinstance(source, str) else source
        return part, part.module.replace("{}", number) + suffix
