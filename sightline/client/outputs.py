"""Results of a client: frozen dataclasses with NumPy arrays, whose axes have names and labels."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from typing import Any, Self, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from sightline.service import drawing
from sightline.service.drawing import View

Row = dict[str, Any]
T = TypeVar("T", bound="Output")


def library(module: str, part: str) -> Any:
    """Import a module that only one part of the client needs, or that needs libraries itself."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(f"{part} needs {error.name}, which is not installed: run pip install {error.name}") from error


@dataclass(frozen=True, eq=False)
class NamedArray:
    """An array whose axes have names, and a label for each index: `axes` has both, in order."""

    values: NDArray[np.float32]
    axes: Mapping[str, Sequence[Any]]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.values, dtype, copy=copy)

    def select(self, **indices: int) -> Self:
        """Return the part at an index of some axes: `select(layer=-1)` has the last layer."""
        for name, index in indices.items():
            if name not in self.axes:
                raise ValueError(f"{name} is no axis of this array; its axes are {', '.join(self.axes)}")
            if index not in range(-(size := len(self.axes[name])), size) or isinstance(index, float | bool):
                raise ValueError(f"{name} must be an index from {-size} to {size - 1}, got {index}")
        axes = {name: labels for name, labels in self.axes.items() if name not in indices}
        return type(self)(self.values[tuple(indices.get(name, slice(None)) for name in self.axes)], axes)

    def to_pandas(self) -> Any:
        """Return a data frame, whose columns are the last axis; a series of a single axis."""
        pandas = library("pandas", "to_pandas()")
        *names, last = axes = self.axes or {"": [""]}  # a number is a series of one
        columns = pandas.Index(axes[last], name=last)
        if not names:
            return pandas.Series(self.values, columns)
        index = pandas.MultiIndex.from_product([axes[name] for name in names], names=names)
        return pandas.DataFrame(self.values.reshape(-1, len(columns)), index, columns)


class Picture(str):
    """A picture as SVG, which Jupyter shows."""

    def _repr_html_(self) -> str:
        return self


@dataclass(frozen=True, eq=False, kw_only=True)
class Output:
    """An output of a call."""

    index: int  # of the input
    raw: Mapping[str, Any] = field(repr=False)  # all fields of the HTTP API, as JSON

    def rows(self) -> list[Row]:
        """Return rows of a table: one with all texts and numbers of the output."""
        return [{name: value for name, value in vars(self).items() if isinstance(value, str | int | float)}]


class Results(list[T]):
    """The outputs of a call, in order, and what its response says of all of them."""

    def __init__(self, outputs: Iterable[T], response: Mapping[str, Any]) -> None:
        super().__init__(outputs)
        self.model: str = response["model"]
        self.usage: Mapping[str, int] = response["usage"]  # numbers of tokens
        self.timings_ms: Mapping[str, float] = response["timings_ms"]

    def to_pandas(self) -> Any:
        """Return a data frame of all outputs."""
        return library("pandas", "to_pandas()").DataFrame([row for output in self for row in output.rows()])

    def _repr_html_(self) -> str:
        pictures = [output._repr_html_() for output in self if isinstance(output, Attention)]
        return "".join(pictures) or table([row for output in self for row in output.rows()])


def table(rows: Sequence[Row]) -> str:
    """Return rows, which have the same keys, as HTML."""
    lines = ["".join(f"<th>{escape(name)}</th>" for name in (rows[0] if rows else ()))]
    for row in rows:
        texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()]
        lines.append("".join(f"<td>{escape(text)}</td>" for text in texts))
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


@dataclass(frozen=True, eq=False, kw_only=True)
class Translation(Output):
    """A translation."""

    text: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Generation(Output):
    """A generated text."""

    rank: int  # among the texts of one input
    text: str
    finish_reason: str  # "eos", "length", "stop" or "empty"
    score: float
    logprobs: NamedArray  # (token,)
    attention: "Attention | None" = None  # only with return_attention


@dataclass(frozen=True, eq=False, kw_only=True)
class Piece(Output):
    """A part of a streamed text; the last one of a text has a reason for its end, and no text."""

    rank: int
    text: str
    finish_reason: str | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Classification(Output):
    """The labels of a text, the most probable first."""

    scores: NamedArray  # (label,)
    attention: "Attention | None" = None  # only with return_attention

    @property
    def label(self) -> str:
        """The most probable label."""
        return str(self.scores.axes["label"][0])

    def rows(self) -> list[Row]:
        scored = zip(self.scores.axes["label"], self.scores.values.tolist(), strict=True)
        return [{"index": self.index, "label": label, "score": score} for label, score in scored]


@dataclass(frozen=True, eq=False, kw_only=True)
class Entity(Output):
    """A part of a text with a label; `start` and `end` count characters."""

    label: str
    score: float
    text: str
    start: int
    end: int


@dataclass(frozen=True, eq=False, kw_only=True)
class RankedDocument(Output):
    """A document and its relevance to a query; `index` is that of the document."""

    text: str
    score: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Attention(Output):
    """The attention of a model for one input: an array (layer, head, query, key) of each kind.

    The tokens of the queries attend to those of the keys.
    """

    model: str
    text: str  # that the decoder wrote
    tokens: Mapping[str, Sequence[str]] = field(repr=False)  # source_tokens, target_tokens, decoder_input_tokens
    maps: Mapping[str, NamedArray] = field(repr=False)  # by the kind: encoder, encoder_slots, cross or decoder

    def draw(
        self, view: View = "alignment", kind: str | None = None, layer: int = -1, head: int | None = None
    ) -> Picture:
        """Return a picture: an alignment, a heat map, or small maps of all heads.

        By default, the kind is cross-attention if there is any. Only the first two views choose a
        layer and a head, by their indices in the array; without a head, they show the mean.
        """
        kind = self._kind(kind)
        array, title = self.maps[kind], f"{self.model}: {drawing.TITLES[kind]}"
        (layers, heads, queries, keys), weights = array.axes.values(), array.values
        if view not in get_args(View):
            raise ValueError(f"view must be {', '.join(get_args(View))}, got {view}")
        if view != "heads":
            array.select(layer=layer, head=0 if head is None else head)  # checks the indices
            layers, weights = [layers[layer]], weights[[layer]]
            heads = heads if head is None else [heads[head]]
            weights = weights.mean(1, keepdims=True) if head is None else weights[:, [head]]
        return Picture(drawing.draw(view, title, layers, heads, (queries, keys), weights))

    def _repr_html_(self) -> str:
        return self.draw()

    def _kind(self, kind: str | None) -> str:
        """Check that there is a kind of attention; None is the first in the order of `TITLES`."""
        chosen = next((each for each in (kind, *drawing.TITLES) if each in self.maps), None)
        if chosen is None or kind not in (None, chosen):
            raise ValueError(f"there is no attention of the kind {kind}; the kinds are {', '.join(self.maps)}")
        return chosen

    def to_bertviz(self) -> dict[str, Any]:
        """Return the arguments of BertViz: `head_view(**attention.to_bertviz())`, or `model_view`.

        As in Transformers, rows of the decoder have the tokens that it reads at each step; rows of
        words have those that it writes.
        """
        torch = library("torch", "to_bertviz()")
        source, inputs = list(self.tokens["source_tokens"]), list(self.tokens["decoder_input_tokens"])
        inputs += self.tokens["target_tokens"][len(inputs) :]
        sizes = {"encoder": (len(source),) * 2, "cross": (len(inputs), len(source)), "decoder": (len(inputs),) * 2}
        layers = {
            kind: [torch.tensor(values[None]) for values in _padded(array, *sizes[kind])]
            for kind, array in self.maps.items()
            if kind in sizes
        }
        if len(layers) == 1 and "cross" not in layers:
            ((kind, attention),) = layers.items()
            return {"attention": attention, "tokens": source if kind == "encoder" else inputs}
        of_kinds = {f"{kind}_attention": attention for kind, attention in layers.items()}
        return {**of_kinds, "encoder_tokens": source, "decoder_tokens": inputs}

    def to_circuitsvis(self, kind: str | None = None, layer: int = -1) -> dict[str, Any]:
        """Return the arguments of CircuitsVis: `attention_heads(**attention.to_circuitsvis())`.

        CircuitsVis shows how the tokens of one text attend to each other. For cross-attention, this
        text has the tokens of the source, then those of the target.
        """
        kind = self._kind(kind)
        array = self.maps[kind].select(layer=layer)
        _, queries, keys = array.axes.values()
        tokens = [*keys, *(queries if kind in ("cross", "encoder_slots") else queries[len(keys) :])]
        return {"tokens": tokens, "attention": _padded(array, len(tokens), len(tokens))}


def _padded(array: NamedArray, rows: int, columns: int) -> NDArray[np.float32]:
    """Return weights with as many rows and columns; the queries are the last rows."""
    num_queries, num_keys = array.values.shape[-2:]
    missing = [(0, 0)] * (array.values.ndim - 2) + [(rows - num_queries, 0), (0, columns - num_keys)]
    return np.pad(array.values, missing)


def read_array(data: Any, shape: Sequence[int]) -> NDArray[np.float32]:
    """Return an array of the API: numbers, or base64 of little-endian float32."""
    flat = np.frombuffer(base64.b64decode(data), "<f4") if isinstance(data, str) else data
    return np.asarray(flat, np.float32).reshape(shape)


def read_row(axis: str, parts: Sequence[Mapping[str, Any]], label: str, number: str) -> NamedArray:
    """Return an array of a single axis: a field of each part with another one as its label."""
    numbers = read_array([part[number] for part in parts], [len(parts)])
    return NamedArray(numbers, {axis: [part[label] for part in parts]})


def read_attention(raw: Mapping[str, Any], model: str, output: Mapping[str, Any]) -> Attention:
    """Read the attention of an output, which has the index of its input and perhaps a text."""
    names = ("source_tokens", "target_tokens", "decoder_input_tokens")
    tokens: dict[str, list[str]] = {name: raw.get(name) or [] for name in names}
    maps = {}
    for each in raw["maps"]:
        is_reduced = each["shape"][1] != len(each["heads"])
        heads = [",".join(map(str, each["heads"]))] if is_reduced else each["heads"]
        queries, keys = drawing.axis_labels(each["kind"], tokens, each["shape"][-1])
        axes = {"layer": each["layers"], "head": heads, "query": queries, "key": keys}
        maps[each["kind"]] = NamedArray(read_array(each["data"], each["shape"]), axes)
    return Attention(index=output["index"], raw=raw, model=model, text=output.get("text", ""), tokens=tokens, maps=maps)
