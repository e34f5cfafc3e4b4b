"""Writers of Marian models and shortlists, and a small random model."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sightline.export.sources.firefox.marian_binary import CONFIG, FLOAT32, INT8, INTGEMM8
from sightline.export.sources.firefox.shortlist import MAGIC, _checksum
from sightline.export.tokenizers.sentencepiece import SentencePieceModel
from tests.export.tokenizers.writing import special_pieces, unigram_pieces, write_sentencepiece

WIDTH, INNER, HEADS, VOCABULARY = 12, 20, 3, 17
OPTIONS = {
    "type": "transformer",
    "dim-vocabs": f"\n  - {VOCABULARY}\n  - {VOCABULARY}",
    "dim-emb": str(WIDTH),
    "transformer-dim-ffn": str(INNER),
    "enc-depth": "2",
    "dec-depth": "1",
    "dec-cell": "ssru",
    "dec-cell-base-depth": "2",
    "input-types": "[]",
    "tied-embeddings-all": "true",
    "transformer-decoder-autoreg": "rnn",
    "transformer-ffn-activation": "relu",
    "transformer-heads": str(HEADS),
    "transformer-postprocess": "dan",
    "transformer-preprocess": '""',
    "version": "v1.9.56 94aeaa46 2021-04-28 00:28:35 +0100",
}


def yaml_of(options: Mapping[str, str]) -> str:
    return "".join(f"{key}:{value}\n" if value[:1] == "\n" else f"{key}: {value}\n" for key, value in options.items())


def write_marian(
    tensors: Mapping[str, NDArray[np.float32]], options: Mapping[str, str] = OPTIONS, quantized: Sequence[str] = ()
) -> bytes:
    """Return a model file; matrices of `quantized` become int8 with multiplier 127 / max |w|."""
    entries: list[tuple[str, int, tuple[int, ...], bytes]] = []
    for name, values in tensors.items():
        if name in quantized:
            multiplier = np.float32(127 / np.abs(values).max())
            rounded = np.rint(values * multiplier).astype(np.int8)
            stored = rounded if name.endswith("Wemb") else rounded.T
            data = stored.tobytes() + struct.pack("<f", multiplier) + bytes(252)
            entries.append((name, INTGEMM8, values.shape, data))
            entries.append((f"{name}_QuantMultA", INTGEMM8, (1, 1), struct.pack("<f", 31.75) + bytes(252)))
        else:
            entries.append((name, FLOAT32, values.shape, values.astype("<f4").tobytes()))
    text = yaml_of(options).encode() + b"\0"
    entries.append((CONFIG, INT8, (len(text),), text))
    return write_entries(entries, padding=136)


def write_entries(
    entries: Sequence[tuple[str, int, tuple[int, ...], bytes]], padding: int = 0, version: int = 1
) -> bytes:
    """Return a file with tensors (name, type number, shape, data)."""
    names = [name.encode() + b"\0" for name, *_ in entries]
    written = struct.pack("<QQ", version, len(entries))
    for encoded, (_, kind, shape, data) in zip(names, entries, strict=True):
        written += struct.pack("<QQQQ", len(encoded), kind, len(shape), len(data))
    written += b"".join(names)
    written += b"".join(struct.pack(f"<{len(shape)}i", *shape) for _, _, shape, _ in entries)
    written += struct.pack("<Q", padding) + bytes(padding)
    return written + b"".join(data for *_, data in entries)


def write_shortlist(lists: Sequence[Sequence[int]], num_frequent: int = 20) -> bytes:
    """Return a binary shortlist with the target ids of each source id."""
    offsets = np.cumsum([0, *map(len, lists)]).astype("<u8")
    targets = np.array([id_ for ids in lists for id_ in ids], "<u4")
    counted = struct.pack("<4Q", num_frequent, 50, len(offsets), len(targets))
    content = counted + offsets.tobytes() + targets.tobytes()
    return struct.pack("<QQ", MAGIC, _checksum(content)) + content


def write_vocabulary(size: int) -> bytes:
    """Return a SentencePiece model with the special tokens of Mozilla's and single letters."""
    letters = [chr(ord("a") + number) for number in range(size - 4)]
    return write_sentencepiece(SentencePieceModel(special_pieces("</s>", "<unk>") + unigram_pieces("▁", *letters, "é")))


def write_folder(
    folder: Path, tensors: Mapping[str, NDArray[np.float32]], options: Mapping[str, str | None] | None = None
) -> Path:
    """Write an English-German model as Mozilla publishes it.

    Args:
        folder: folder to create.
        tensors: see `random_tensors`.
        options: options of the model that differ from `OPTIONS`; None removes an option.
    """
    folder.mkdir()
    quantized = [name for name in tensors if name.endswith("Wemb")]
    sizes = [len(tensors[name]) for name in quantized]
    vocabularies = f"\n  - {sizes[0]}\n  - {sizes[-1]}"
    given = {**OPTIONS, "dim-vocabs": vocabularies, **(options or {})}
    merged = {name: value for name, value in given.items() if value is not None}
    (folder / "model.ende.intgemm8.bin").write_bytes(write_marian(tensors, merged, quantized))
    names = ["vocab"] if len(sizes) == 1 else ["srcvocab", "trgvocab"]
    for name, size in zip(names, sizes, strict=True):
        (folder / f"{name}.ende.spm").write_bytes(write_vocabulary(size))
    return folder


def random_tensors(
    *,
    separate: bool = False,
    seed: int = 0,
    width: int = WIDTH,
    inner: int = INNER,
    vocabularies: tuple[int, int] = (VOCABULARY + 4, VOCABULARY),
) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of a model with two encoder layers and one decoder layer.

    Args:
        separate: whether source and target have tables of their own.
        seed: of the random numbers.
        width: of the model.
        inner: width within feed-forward layers.
        vocabularies: numbers of tokens of source and target; the second counts for one table.
    """
    draw = np.random.default_rng(seed)

    def normal(*shape: int) -> NDArray[np.float32]:
        return draw.normal(0, 0.5, shape).astype(np.float32)

    tables = (
        {"encoder_Wemb": vocabularies[0], "decoder_Wemb": vocabularies[1]} if separate else {"Wemb": vocabularies[1]}
    )
    tensors = {name: normal(size, width) for name, size in tables.items()}
    tensors["decoder_ff_logit_out_b"] = normal(1, vocabularies[1])

    def add_norm(name: str) -> None:
        tensors[f"{name}_ln_scale"], tensors[f"{name}_ln_bias"] = 1 + normal(1, width), normal(1, width)

    def add_block(name: str, attention: str) -> None:
        for part in "qkvo":
            tensors[f"{name}_{attention}_W{part}"] = normal(width, width)
            tensors[f"{name}_{attention}_b{part}"] = normal(1, width)
        add_norm(f"{name}_{attention}_Wo")
        tensors[f"{name}_ffn_W1"], tensors[f"{name}_ffn_b1"] = normal(width, inner), normal(1, inner)
        tensors[f"{name}_ffn_W2"], tensors[f"{name}_ffn_b2"] = normal(inner, width), normal(1, width)
        add_norm(f"{name}_ffn_ffn")

    add_block("encoder_l1", "self")
    add_block("encoder_l2", "self")
    add_block("decoder_l1", "context")
    tensors["decoder_l1_rnn_W"], tensors["decoder_l1_rnn_Wf"] = normal(width, width), normal(width, width)
    tensors["decoder_l1_rnn_bf"] = normal(1, width)
    add_norm("decoder_l1_rnn_ffn")
    return tensors
