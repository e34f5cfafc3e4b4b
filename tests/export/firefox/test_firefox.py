import gzip
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.firefox import Metadata, find_firefox_files, read_metadata
from sightline.export.sources.firefox.marian_binary import MarianModel, read_file
from sightline.export.sources.firefox.shortlist import MAGIC, Candidates, parse_shortlist
from sightline.export.sources.opened_checkpoint import FolderFiles
from tests.export.firefox.models import HEADS, OPTIONS, VOCABULARY, WIDTH, random_tensors, write_marian, write_shortlist
from tests.export.firefox.reference import END_ID, EPSILON, FirefoxReference

TENSORS = random_tensors()
SOURCE = [5, 9, 3, 0]


def model_of(tensors: dict[str, NDArray[np.float32]]) -> MarianModel:
    return MarianModel(write_marian(tensors, OPTIONS), "model.bin")


# Reference


class TorchModel:
    """The same equations with PyTorch's layers, over all target positions at once."""

    def __init__(self, tensors: dict[str, NDArray[np.float32]], *, separate: bool = False) -> None:
        self.w = {name: torch.tensor(values, dtype=torch.float64) for name, values in tensors.items()}
        self.source = self.w["encoder_Wemb" if separate else "Wemb"]
        self.target = self.w["decoder_Wemb" if separate else "Wemb"]
        half = WIDTH // 2
        angles = torch.arange(50.0, dtype=torch.float64)[:, None] * torch.exp(
            torch.arange(half, dtype=torch.float64) * -(np.log(10000.0) / (half - 1))
        )
        self.positions = torch.cat([angles.sin(), angles.cos()], 1)

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale, bias = self.w[f"{name}_ln_scale"][0], self.w[f"{name}_ln_bias"][0]
        return functional.layer_norm(x, (WIDTH,), scale, bias, EPSILON)

    def attend(self, name: str, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        parts = "qkvo"
        weights = torch.cat([self.w[f"{name}_W{part}"].T for part in parts[:3]])
        biases = torch.cat([self.w[f"{name}_b{part}"][0] for part in parts[:3]])
        output, maps = functional.multi_head_attention_forward(
            x, memory, memory, WIDTH, HEADS, weights, biases, None, None, False, 0.0,
            self.w[f"{name}_Wo"].T, self.w[f"{name}_bo"][0], training=False, average_attn_weights=False,
        )  # fmt: skip
        assert maps is not None
        return self.norm(f"{name}_Wo", x + output), maps

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        inner = (x @ self.w[f"{name}_W1"] + self.w[f"{name}_b1"]).relu()
        return self.norm(f"{name}_ffn", x + inner @ self.w[f"{name}_W2"] + self.w[f"{name}_b2"])

    def logits(self, source: list[int], target: list[int]) -> tuple[Tensor, Tensor]:
        x = self.source[source] * WIDTH**0.5 + self.positions[: len(source)]
        for layer in ("encoder_l1", "encoder_l2"):
            x = self.feed_forward(f"{layer}_ffn", self.attend(f"{layer}_self", x, x)[0])
        embedded = torch.cat([torch.zeros(1, WIDTH), self.target[target] * WIDTH**0.5])
        y = embedded + self.positions[: len(target) + 1]
        forget = (y @ self.w["decoder_l1_rnn_Wf"] + self.w["decoder_l1_rnn_bf"]).sigmoid()
        cells = [torch.zeros(WIDTH, dtype=torch.float64)]
        for gate, value in zip(forget, y @ self.w["decoder_l1_rnn_W"], strict=True):
            cells.append(gate * cells[-1] + (1 - gate) * value)
        y = self.norm("decoder_l1_rnn_ffn", y + torch.stack(cells[1:]).relu())
        y, maps = self.attend("decoder_l1_context", y, x)
        y = self.feed_forward("decoder_l1_ffn", y)
        return y @ self.target.T + self.w["decoder_ff_logit_out_b"], maps


@pytest.mark.parametrize("separate", [False, True])
def test_the_reference_has_the_logits_and_maps_of_pytorch(separate: bool) -> None:
    tensors = random_tensors(separate=separate, seed=3)
    reference = FirefoxReference(model_of(tensors))
    target = [4, 11, 16]
    logits, maps = TorchModel(tensors, separate=separate).logits(SOURCE, target)
    steps = list(reference.steps(SOURCE, [None, *target]))
    # Both compute in float64 in another order; the sums have at most d * d terms of size 1.
    limit = WIDTH**2 * 100 * np.finfo(np.float64).eps
    np.testing.assert_allclose(np.stack([step[0] for step in steps]), logits.numpy(), rtol=limit, atol=limit)
    np.testing.assert_allclose(np.stack([step[1][0] for step in steps], 1), maps.numpy(), rtol=limit, atol=limit)


def test_a_translation_is_greedy_up_to_the_end_token() -> None:
    reference = FirefoxReference(model_of(TENSORS))
    translation = reference.translate(SOURCE, 8)
    steps = list(reference.steps(SOURCE, [None, *translation.ids]))
    best = [int(logits.argmax()) for logits, _ in steps]
    assert best[: len(translation.ids)] == translation.ids
    assert len(translation.cross_attention) == len(translation.ids) + 1
    assert best[-1] == END_ID or len(best) == 8
    np.testing.assert_allclose(translation.cross_attention.sum(-1), 1)


def test_candidates_restrict_a_translation() -> None:
    reference = FirefoxReference(model_of(TENSORS))
    whole = reference.translate(SOURCE, 8)
    assert reference.translate(SOURCE, 8, range(VOCABULARY)).ids == whole.ids
    assert set(reference.translate(SOURCE, 8, [0, 3, 4]).ids) <= {3, 4}


# Shortlist

LISTS = [[1], [], [3, 39], [5]]


def shortlist(data: bytes, is_shared: bool = False) -> Candidates:
    return parse_shortlist(data, "lex.bin", 4, 40, is_shared)


def test_a_shortlist_has_frequent_tokens_and_translations() -> None:
    read = shortlist(write_shortlist(LISTS))
    assert read.frequent.tolist() == list(range(20))
    assert read.by_source.tolist() == [[1, 0], [0, 0], [3, 39], [5, 0], [0, 0]]  # 0 is the end token, which is frequent
    assert shortlist(write_shortlist(LISTS), True).by_source[:, 2].tolist() == [0, 1, 2, 3, 0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (write_shortlist(LISTS)[:40], "it must have at least 48 bytes, got 40"),
        (bytes(64), f"its first 8 bytes must be {MAGIC:#x}, got 0x0"),
        (write_shortlist(LISTS)[:-1], "it must have 104 bytes for 5 offsets and 4 ids, got 103"),
        (write_shortlist(LISTS[:3]), "it must have 5 offsets for the source vocabulary, got 4"),
        (write_shortlist(LISTS)[:-1] + b"\1", "its checksum does not match"),
        (write_shortlist([[40], [], [], []]), "its ids must be less than the 40 of the target vocabulary, got 40"),
        (write_shortlist([[1] * 1001, [], [], []]), "must have at most 1000 translations, got 1001"),
        (write_shortlist(LISTS, num_frequent=16), "it must have at least 17 frequent tokens, got 16"),
    ],
)
def test_shortlists_that_are_damaged(data: bytes, message: str) -> None:
    expected = rf"^lex.bin is not a shortlist of this model: .*{message}; download it again, or import with --no-short"
    with pytest.raises(ImportFailedError, match=expected):
        shortlist(data)


def test_each_truncated_shortlist_is_an_error() -> None:
    whole = write_shortlist(LISTS)
    for size in range(len(whole)):
        with pytest.raises(ImportFailedError):
            shortlist(whole[:size])


# Folders


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("vocabularies", [["vocab"], ["srcvocab", "trgvocab"]])
def test_files_are_found_by_their_names(tmp_path: Path, suffix: str, vocabularies: list[str]) -> None:
    for name in ["model.enja.intgemm8.bin", "lex.50.50.enja.s2t.bin", *(f"{one}.enja.spm" for one in vocabularies)]:
        (tmp_path / f"{name}{suffix}").write_bytes(gzip.compress(b"content") if suffix else b"content")
    (tmp_path / "metadata.json").write_text("{}")
    files = find_firefox_files(tmp_path)
    assert files.model == tmp_path / f"model.enja.intgemm8.bin{suffix}"
    assert files.source_vocabulary == tmp_path / f"{vocabularies[0]}.enja.spm{suffix}"
    assert files.target_vocabulary == tmp_path / f"{vocabularies[-1]}.enja.spm{suffix}"
    assert files.shortlist == tmp_path / f"lex.50.50.enja.s2t.bin{suffix}"
    assert read_file(files.model) == b"content"
    assert files.source_and_target == ("en", "ja")
    assert replace(files, languages="ensrp").source_and_target is None


def test_unpacked_files_and_models_with_scales_are_preferred(tmp_path: Path) -> None:
    for name in ("model.ende.intgemm8.bin", "model.ende.intgemm.alphas.bin.gz", "vocab.ende.spm.gz", "vocab.ende.spm"):
        (tmp_path / name).touch()
    files = find_firefox_files(tmp_path)
    assert (files.model.name, files.source_vocabulary.name) == ("model.ende.intgemm.alphas.bin.gz", "vocab.ende.spm")
    assert files.shortlist is None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "must have one model.XXYY.intgemm.alphas.bin or .intgemm8.bin, it has none"),
        (["model.ende.intgemm8.bin", "model.deen.intgemm8.bin"], "it has models of 2 language pairs: deen, ende"),
        (["model.ende.intgemm8.bin"], "has no vocab.ende.spm, and not both srcvocab.ende.spm and trgvocab.ende"),
        (["model.ende.intgemm8.bin", "srcvocab.ende.spm"], "not both srcvocab.ende.spm and trgvocab.ende.spm"),
    ],
)
def test_files_that_are_missing(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(ImportFailedError, match=message):
        find_firefox_files(tmp_path)


# Metadata

MODEL_DATA = b"the model"
# The fields of `metadata.json` as Mozilla publishes it, without statistics and scores.
GIVEN = {
    "architecture": "base-memory",
    "byteSize": len(MODEL_DATA),
    "hash": hashlib.sha256(MODEL_DATA).hexdigest(),
    "modelConfig": {"dim-emb": 384},
    "sourceLanguage": "zh-Hans",
    "targetLanguage": "en",
    "version": "2.0",
}


def metadata_of(folder: Path, values: Any, pair: str = "zhen", suffix: str = "") -> Metadata:
    data = gzip.compress(MODEL_DATA) if suffix else MODEL_DATA
    (folder / f"model.{pair}.intgemm8.bin{suffix}").write_bytes(data)
    (folder / f"vocab.{pair}.spm").touch()
    if values is not None:
        (folder / "metadata.json").write_text(json.dumps(values), encoding="utf-8")
    opened = FolderFiles(folder)
    return read_metadata(opened, find_firefox_files(folder))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_metadata_has_the_languages_and_a_description(tmp_path: Path, suffix: str) -> None:
    described = "Firefox translation model: zh-Hans to en, base-memory, version 2.0"
    assert metadata_of(tmp_path, GIVEN, suffix=suffix) == Metadata(("zh-Hans", "en"), "firefox-base-memory", described)


def test_metadata_is_optional_and_each_field_of_it(tmp_path: Path) -> None:
    assert metadata_of(tmp_path, None) == metadata_of(tmp_path, {}) == Metadata()
    assert metadata_of(tmp_path, dict.fromkeys(GIVEN)) == Metadata()
    described = "Firefox translation model: version 1.0"
    for values in ({"version": "1.0"}, {"version": "1.0", "sourceLanguage": "zh"}):
        assert metadata_of(tmp_path, values) == Metadata(None, "firefox", described)


def test_metadata_names_languages_that_file_names_leave_open(tmp_path: Path) -> None:
    values = {"sourceLanguage": "en", "targetLanguage": "zh-Hant"}
    for pair in ("enzh", "enzhhant"):
        (tmp_path / pair).mkdir()
        assert metadata_of(tmp_path / pair, values, pair).languages == ("en", "zh-Hant")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "metadata.json: Input should be an object; download it again, or remove it"),
        (GIVEN | {"sourceLanguage": 1}, "metadata.json: sourceLanguage: Input should be a valid string; download it"),
        (GIVEN | {"targetLanguage": "English"}, "metadata.json: targetLanguage: String should match pattern"),
        (
            GIVEN | {"targetLanguage": "de"},
            "has the languages zh-Hans and de, but model.zhen.intgemm8.bin has 'zhen'; they belong to different "
            "models: download both again, or remove metadata.json",
        ),
        (
            GIVEN | {"sourceLanguage": "en", "targetLanguage": "zh-Hans"},
            "has the languages en and zh-Hans, but model.zhen.intgemm8.bin has 'zhen'",
        ),
        (GIVEN | {"hash": "00"}, "belongs to another version of the model: its hash is not the SHA-256 of model.zhen"),
        (GIVEN | {"version": 2.0}, "metadata.json: version: Input should be a valid string; download it again"),
    ],
)
def test_metadata_of_another_model(tmp_path: Path, values: Any, message: str) -> None:
    with pytest.raises(ImportFailedError, match=re.escape(message)):
        metadata_of(tmp_path, values)
