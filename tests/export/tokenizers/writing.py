"""Writer of SentencePiece models, for tests without the `sentencepiece` package."""

import struct

from sightline.export.tokenizers.sentencepiece import Piece, PieceKind, SentencePieceModel


def varint(value: int) -> bytes:
    written = b""
    while value > 0x7F:
        written += bytes([value & 0x7F | 0x80])
        value >>= 7
    return written + bytes([value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def data(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


def write_sentencepiece(model: SentencePieceModel) -> bytes:
    """Return a `ModelProto` with the given content."""
    pieces = b"".join(
        data(
            1,
            data(1, piece.text.encode()) + varint(2 << 3 | 5) + struct.pack("<f", piece.score) + number(3, piece.kind),
        )
        for piece in model.pieces
    )
    specials = {piece.text: id_ for id_, piece in enumerate(model.pieces) if piece.kind != PieceKind.NORMAL}
    trainer = number(3, 2 if model.is_bpe else 1) + number(35, model.byte_fallback)
    for field, name_field, name in ((40, 45, "<unk>"), (41, 46, "<s>"), (42, 47, "</s>"), (43, 48, "<pad>")):
        # -1 (all bits set) is the id of a special token that the model does not have.
        trainer += number(field, specials.get(name, (1 << 64) - 1)) + data(name_field, name.encode())
    normalizer = data(2, model.charsmap) + number(3, model.add_dummy_prefix) + number(4, model.remove_extra_whitespaces)
    return pieces + data(2, trainer) + data(3, normalizer)


def special_pieces(*names: str) -> tuple[Piece, ...]:
    """Return control pieces, of which `<unk>` is the unknown piece."""
    return tuple(Piece(name, 0.0, PieceKind.UNKNOWN if name == "<unk>" else PieceKind.CONTROL) for name in names)


def unigram_pieces(*texts: str) -> tuple[Piece, ...]:
    """Return pieces whose score is at most -1 and decreases with their length and position."""
    return tuple(Piece(text, -1.0 - 0.5 * len(text) - index / 64) for index, text in enumerate(texts))


def bpe_pieces(*texts: str) -> tuple[Piece, ...]:
    """Return pieces with the negative rank as the score."""
    return tuple(Piece(text, -float(index)) for index, text in enumerate(texts))
