"""Contributions of tokens as attention maps: measures of a graph become shares of rows."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from sightline.service.engine.generation import NonFiniteError
from sightline.service.engine.request import GenerateRequest, Target
from sightline.service.runtime.runner import Array, Runner

TINY = np.finfo(np.float32).tiny  # avoids a division by 0


def with_contributions(runner: Runner, request: GenerateRequest, targets: Sequence[Target]) -> tuple[Target, ...]:
    """Return targets with contributions as maps, from a pass over the source and each whole target.

    Raises `NonFiniteError`.
    """
    assert request.contributions is not None, "the request needs contributions"
    start_ids, changed = runner.manifest.tokens.start_ids, list[Target]()
    first = len(start_ids) - 1  # row of the first token
    for target in targets:
        inputs = [*start_ids, *(token.id for token in target.tokens[:-1])]
        ids = np.array([request.source_ids], np.int64), np.array([inputs], np.int64)
        measured = runner.measure_contributions(request.contributions, *ids)
        if not all(np.isfinite(array).all() for array in measured.values()):
            raise NonFiniteError
        maps = maps_of(request.contributions, measured)
        maps |= {kind: maps[kind][:, :, first:] for kind in ("cross", "decoder")}
        changed.append(replace(target, attention=maps))
    return tuple(changed)


def maps_of(method: str, measured: Mapping[str, Array]) -> dict[str, Array]:
    """Return maps (L, H, rows, columns) from the outputs of a method by kind, see `Graph`."""
    if method == "norms":
        return dict(measured)
    rows = {kind: columns.swapaxes(1, 2) for kind, columns in measured.items()}  # (L, rows, columns)
    rows["decoder"] = np.tril(rows["decoder"])  # later tokens have the rounding errors of other products
    shares = {kind: array / np.maximum(array.sum(axis=-1, keepdims=True), TINY) for kind, array in rows.items()}
    return {kind: array[:, None] for kind, array in (roll_out(shares) if method == "alti" else shares).items()}


def roll_out(shares: Mapping[str, Array]) -> dict[str, Array]:
    """Return the shares of the embeddings of both texts in the outputs of each layer.

    They are the products of the shares of the sublayers (Ferrando et al. 2022, "Towards Opening the
    Black Box of Neural Machine Translation", section 3). Rows of `cross` and `decoder` together
    have the sum 1.
    """
    encoder = list(accumulate(shares["encoder"], lambda before, layer: layer @ before))
    of_source, of_target = np.zeros_like(shares["cross"][0, :, :-1]), np.eye(shares["decoder"].shape[1])
    maps: dict[str, list[Array]] = {"encoder": encoder, "cross": [], "decoder": []}
    for mixed, attended in zip(shares["decoder"], shares["cross"], strict=True):
        kept = attended[:, -1:]  # of the vector that cross-attention is added to
        of_source = attended[:, :-1] @ encoder[-1] + kept * (mixed @ of_source)
        of_target = kept * (mixed @ of_target)
        maps["cross"].append(of_source)
        maps["decoder"].append(of_target)
    return {kind: np.stack(layers).astype(np.float32) for kind, layers in maps.items()}
