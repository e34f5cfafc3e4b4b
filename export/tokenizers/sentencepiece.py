"""Reader of SentencePiece models, and their conversion to the `tokenizers` library.

The file is a protocol buffer, `ModelProto` in `sentencepiece_model.proto` (Kudo and Richardson
2018). The conversion gives the ids of the `sentencepiece` package, except for the cases below.

- BPE: the package merges the leftmost of two pairs with the same result, such as (a, aa) and
  (aa, a). The library has an order for them.
- A character that a normalization rule replaces, before a combining mark: the library removes the
  mark. Texts in composed form (NFC) have hardly any such sequences.
- User-defined symbols of a BPE model: the package inserts the space before a text once, the library
  also after each symbol.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from google.protobuf.message import DecodeError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from sightline.base.external_data import message_class
from sightline.export.import_errors import ImportFailedError

SPACE = "▁"  # U+2581, a space in pieces
# A name that starts with a space cannot be found in a text, in which all spaces are `SPACE`. It
# keeps the id of a piece that this tokenizer must not use. The decoder removes the space.
HIDDEN = " "
# Spaces before and after a text, as the `tokenizers` library finds them in time that is linear in
# the length of the text.
OUTER_SPACES = r"\A +(?:[ ▁]*\z)?|(?<![ ▁])[ ▁]+\z"


class PieceKind(IntEnum):
    """`ModelProto.SentencePiece.Type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Piece:
    """An entry of the vocabulary; `score` is a log-probability (Unigram) or minus a rank (BPE)."""

    text: str
    score: float = 0.0
    kind: PieceKind = PieceKind.NORMAL


@dataclass(frozen=True)
class SentencePieceModel:
    """Content of a SentencePiece model as far as tokenization depends on it."""

    pieces: tuple[Piece, ...]  # the index is the id
    is_bpe: bool = False  # Unigram otherwise
    byte_fallback: bool = False  # unknown characters are split into bytes
    charsmap: bytes = b""  # compiled normalization rules; empty for none
    add_dummy_prefix: bool = True  # insert a space before a text
    remove_extra_whitespaces: bool = True  # strip spaces, and merge several into one

    @property
    def ids(self) -> dict[str, int]:
        """The id of each piece."""
        return {piece.text: id_ for id_, piece in enumerate(self.pieces)}

    @property
    def unknown(self) -> str:
        """The piece for unknown characters, such as `<unk>`."""
        return next(piece.text for piece in self.pieces if piece.kind == PieceKind.UNKNOWN)

    @property
    def control_pieces(self) -> tuple[str, ...]:
        """Pieces that never occur in a text, such as `</s>`."""
        return tuple(piece.text for piece in self.pieces if piece.kind == PieceKind.CONTROL)


# Reading


# Fields of `ModelProto`, see `message_class`. Those with a default of 1 are declared as repeated.
_MODEL = message_class(
    {
        "Model": {"pieces": (1, "Piece"), "trainers": (2, "Trainer"), "normalizers": (3, "Normalizer")},
        "Piece": {"text": (1, "string"), "score": (2, "float"), "kinds": (3, "int64s")},
        "Trainer": {"kinds": (3, "int64s"), "has_suffix": (24, "int32"), "byte_fallback": (35, "int32")},
        "Normalizer": {
            "charsmap": (2, "bytes"),
            "add_dummy_prefix": (3, "int64s"),
            "remove_extra_whitespaces": (4, "int64s"),
            "escape_whitespaces": (5, "int64s"),
        },
    }
)


def read_sentencepiece(data: bytes, file: str) -> SentencePieceModel:
    """Parse a `.spm` or `.model` file; `file` is its name in errors."""
    try:
        return _parse(_MODEL.FromString(data))
    except DecodeError:
        reason = "it is truncated, or not one"
    except ValueError as error:
        reason = str(error)
    raise ImportFailedError(f"{file} is not a SentencePiece model that can be converted: {reason}")


def _parse(message: Any) -> SentencePieceModel:
    """Convert a `ModelProto`; options without support raise `ValueError`."""
    pieces = tuple(Piece(one.text, one.score, PieceKind(_last(one.kinds))) for one in message.pieces)
    trainer = [_MODEL().trainers.add(), *message.trainers][-1]
    normalizer = [_MODEL().normalizers.add(), *message.normalizers][-1]
    if sum(piece.kind == PieceKind.UNKNOWN for piece in pieces) != 1:
        raise ValueError("it must have exactly one piece for unknown characters")
    if len({piece.text for piece in pieces}) < len(pieces):
        raise ValueError("a piece occurs twice")
    kind = _last(trainer.kinds)
    if kind not in (1, 2):
        raise ValueError(f"its model type {kind} is not supported; supported are 1 (Unigram) and 2 (BPE)")
    if trainer.has_suffix:
        raise ValueError("treat_whitespace_as_suffix is not supported")
    if not _last(normalizer.escape_whitespaces):
        raise ValueError("escape_whitespaces must be true")
    return SentencePieceModel(
        pieces,
        is_bpe=kind == 2,
        byte_fallback=bool(trainer.byte_fallback),
        charsmap=normalizer.charsmap,
        add_dummy_prefix=bool(_last(normalizer.add_dummy_prefix)),
        remove_extra_whitespaces=bool(_last(normalizer.remove_extra_whitespaces)),
    )


def _last(values: Sequence[int]) -> int:
    """Return the last value of a field whose default is 1."""
    return values[-1] if values else 1


# Conversion


def convert_sentencepiece(
    model: SentencePieceModel,
    ids: Mapping[str, int] | None = None,
    *,
    special: Sequence[str] = (),
    codes: Sequence[str] = (),
    prefix: Sequence[normalizers.Normalizer] = (),
) -> Tokenizer:
    """Convert a model to a tokenizer without a template.

    Raises `ImportFailedError`, also if a BPE model has unused pieces that texts can reach.

    Args:
        ids: ids of all tokens, from 0 without gaps; those of the model by default. Pieces of the
            model that are missing here are not used. Tokens that are not in the model, such as
            pieces of the other language, are never found in a text.
        special: special tokens besides the control pieces and the unknown piece. All must have ids.
        codes: tokens that are found in a text before it is split into pieces.
        prefix: normalization steps before those of the model.
    """
    ids = model.ids if ids is None else ids
    _check_ids(model, ids, [*special, *codes])
    known = {piece.text: piece for piece in model.pieces}
    added = {model.unknown, *model.control_pieces, *special, *codes} & ids.keys()
    kept = (PieceKind.NORMAL, PieceKind.USER_DEFINED, PieceKind.BYTE)
    usable = {token for token in ids.keys() & known.keys() if known[token].kind in kept} - added
    # Tokens that are not found in a text have a hidden name.
    names = {token: token if token in added or token in usable else HIDDEN + token for token in ids}
    if model.is_bpe:
        vocabulary = {names[token]: id_ for token, id_ in ids.items()}
        tokenizer = Tokenizer(
            models.BPE(
                vocabulary,
                _merges(model, ids, added),
                unk_token=model.unknown,
                fuse_unk=True,
                byte_fallback=model.byte_fallback,
            )
        )
    else:
        scores = _scores(model)
        ordered = sorted(ids, key=ids.__getitem__)
        entries = [(names[token], scores.get(token, 0.0) if token in usable else 0.0) for token in ordered]
        tokenizer = Tokenizer(models.Unigram(entries, ids[model.unknown], byte_fallback=model.byte_fallback))
    has_hidden = any(name.startswith(HIDDEN) for name in names.values())
    tokenizer.normalizer = _normalizer(model, prefix)
    marks = [piece.text for piece in model.pieces if piece.kind in (PieceKind.NORMAL, PieceKind.USER_DEFINED)]
    if SPACE in ids and SPACE in known and not any(SPACE in text[1:] for text in marks):
        # No piece goes beyond a word, so that words can be tokenized, and cached, on their own.
        tokenizer.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    steps: list[decoders.Decoder] = [decoders.Replace(HIDDEN, "")] if has_hidden else []
    steps += [decoders.Replace(SPACE, " ")]
    steps += [decoders.ByteFallback()] if model.byte_fallback else []
    steps += [decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] if model.add_dummy_prefix or model.remove_extra_whitespaces else []
    tokenizer.decoder = decoders.Sequence(steps)
    special_names = sorted(added - set(codes), key=ids.__getitem__)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special_names])
    tokenizer.add_tokens([AddedToken(code, special=False, normalized=False) for code in codes])
    if model.is_bpe:
        symbols = [piece.text for piece in model.pieces if piece.kind == PieceKind.USER_DEFINED and piece.text in ids]
        tokenizer.add_tokens([AddedToken(symbol, special=False, normalized=False) for symbol in symbols])
    return tokenizer


def _check_ids(model: SentencePieceModel, ids: Mapping[str, int], special: Sequence[str]) -> None:
    if sorted(ids.values()) != list(range(len(ids))):
        raise ImportFailedError(
            f"the vocabulary of {len(ids)} tokens must have the ids 0 to {len(ids) - 1}, each of them once"
        )
    missing = [token for token in (model.unknown, *special) if token not in ids]
    if missing:
        raise ImportFailedError(f"the vocabulary has no token {missing[0]!r}, which the tokenizer needs")
    if not all(math.isfinite(piece.score) for piece in model.pieces):
        raise ImportFailedError("the SentencePiece model has a score that is not a finite number; download it again")
    if not model.is_bpe:
        return
    parts = {piece.text for piece in model.pieces if piece.kind in (PieceKind.NORMAL, PieceKind.UNUSED)}
    for text in (piece.text for piece in model.pieces if piece.kind == PieceKind.UNUSED):
        # A character is a piece, and two pieces are merged. Padding of the vocabulary is no result.
        splits = [(text[:size], text[size:]) for size in range(1, len(text))]
        if len(text) == 1 or any(all(len(part) == 1 or part in parts for part in split) for split in splits):
            raise ImportFailedError(
                f"SentencePiece models of the type BPE with an unused piece such as {text[:40]!r} are not supported, "
                "because that piece is split again after merging"
            )


def _normalizer(model: SentencePieceModel, prefix: Sequence[normalizers.Normalizer]) -> normalizers.Normalizer:
    """Return the steps of `normalizer.cc` of SentencePiece as a sequence."""
    steps = list(prefix)
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(OUTER_SPACES), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _scores(model: SentencePieceModel) -> dict[str, float]:
    """Return the scores of pieces in a Unigram model.

    A user-defined symbol gets length × (maximum score) - 0.1, as in `unigram_model.cc`: more than
    all other segmentations of its characters have.
    """
    normal = [piece.score for piece in model.pieces if piece.kind == PieceKind.NORMAL]
    highest = max(normal, default=0.0)
    return {
        piece.text: len(piece.text) * highest - 0.1 if piece.kind == PieceKind.USER_DEFINED else piece.score
        for piece in model.pieces
    }


def _merges(model: SentencePieceModel, ids: Mapping[str, int], added: set[str]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a piece, by the score of the result.

    SentencePiece does not store merges. It merges the adjacent pair whose result has the highest
    score, so each way to split a piece into two is a merge.
    """
    scores = {
        piece.text: piece.score
        for piece in model.pieces
        if piece.kind == PieceKind.NORMAL and piece.text in ids and piece.text not in added
    }
    merges: list[tuple[str, str]] = []
    for text in sorted(scores, key=lambda text: (-scores[text], ids[text])):
        pairs = [(text[:size], text[size:]) for size in range(1, len(text))]
        known = [pair for pair in pairs if pair[0] in scores and pair[1] in scores]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges
