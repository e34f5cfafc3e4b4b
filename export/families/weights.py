"""Weights of a checkpoint by the names that the builder uses.

A module is named by its place in the model. `{}` is the number of a layer, STACK is `encoder` or
`decoder`. A module has `weight`, and `bias` if the checkpoint has one:

- `embedding`: the table of tokens (V, E); `STACK.embedding` if encoder and decoder differ
- `STACK.positions` (P, M), `STACK.types` (2, E), `STACK.embedding_norm`,
  `STACK.embedding_projection`
- `STACK.{}.self_attention.query`, `.key`, `.value`, `.output`, `.query_norm`, `.key_norm`
- `STACK.{}.cross_attention.*`, the same
- `STACK.{}.self_attention_norm`, `.cross_attention_norm`, `.feed_forward_norm`
- `STACK.{}.feed_forward.inner`, `.gate`, `.outer`
- `STACK.{}.cell.forget`, `.cell.input` of a recurrent unit
- `STACK.relative_bias` (buckets, H), `STACK.norm`
- `encoder.projection.{}` (k, P), where `{}` is the number of the matrix
- `output`: projection to the vocabulary (V, M); `embedding` if there is none
- `head.dense`, `head.norm`, `head.output`
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
_LAYER = re.compile(r"\.(\d+)(?=\.)")


class Tensors(Protocol):
    """Tensors of a checkpoint by name."""

    def __contains__(self, name: object) -> bool: ...

    def read(self, name: str) -> Array: ...


@dataclass(frozen=True)
class Part:
    """Module of a checkpoint that differs in form from that of the builder."""

    module: str
    transposed: bool = False  # the matrix is stored as (inputs, outputs)
    index: int = 0  # which of `count` equal parts along the outputs
    count: int = 1
    skip: int = 0  # number of rows to omit at the start, such as positions that are never used


Computed = Callable[[], Array]  # a tensor that the checkpoint does not store
Source = str | Part | Computed


class Weights:
    """Weights of a model by the names of this module."""

    def __init__(self, tensors: Tensors, modules: Mapping[str, Source]) -> None:
        """Create a view.

        Args:
            tensors: the checkpoint.
            modules: module of the checkpoint for each module of the builder, both with `{}` for the
                number of a layer, or for one layer with its number. A name that ends in `.weight`
                or `.bias` stands for that tensor alone.
        """
        self._tensors = tensors
        self._modules = modules

    def __contains__(self, name: str) -> bool:
        source = self._find(name)
        return source is not None and (callable(source) or source[1] in self._tensors)

    def read(self, name: str) -> Array:
        """Return a tensor as float32, with matrices as (outputs, inputs).

        Raises:
            KeyError: the table of the family has no such module.
        """
        source = self._find(name)
        if source is None:
            raise KeyError(name)
        if callable(source):
            return source()
        part, tensor = source
        array = self._tensors.read(tensor)
        if part.transposed and array.ndim == 2:
            array = array.T
        if part.count > 1:
            array = np.split(array, part.count)[part.index]
        return np.ascontiguousarray(array[part.skip :])

    def _find(self, name: str) -> tuple[Part, str] | Computed | None:
        """Return where a tensor is: its part of a tensor of the checkpoint, or a function."""
        number = next(iter(_LAYER.findall(name)), "")
        pattern = _LAYER.sub(".{}", name, count=1)
        module, _, kind = pattern.rpartition(".")
        source, suffix = self._modules.get(pattern), ""
        for found in (name.rpartition(".")[0], module):  # an entry of one layer precedes that of all layers
            if source is None:
                source, suffix = self._modules.get(found), f".{kind}"
        if source is None:
            return None
        if callable(source):
            return source if suffix in ("", ".weight") else None
        part = Part(source) if isinstance(source, str) else source
        return part, part.module.replace("{}", number) + suffix
