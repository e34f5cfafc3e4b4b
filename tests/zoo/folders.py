"""Folders of tiny checkpoints as others publish them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

Array = NDArray[Any]


def byte_tokenizer(*special: str, words: tuple[str, ...] = (), end: str = "") -> Tokenizer:
    """Return a tokenizer of bytes, whose special tokens have the ids from 256 on.

    Args:
        special: names of special tokens.
        words: further tokens.
        end: the special token that is appended to a text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: id_ for id_, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens(list(words))
    if end:
        special_id = 256 + special.index(end)
        tokenizer.post_processor = processors.TemplateProcessing(f"$A {end}", special_tokens=[(end, special_id)])
    return tokenizer


def write_folder(folder: Path, model: Any, tokenizer: Tokenizer, files: Mapping[str, Any] = {}) -> None:
    """Write a checkpoint, and further files as JSON or text."""
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")


def modules(*kinds: str) -> list[dict[str, Any]]:
    """Return the content of modules.json of sentence-transformers."""
    paths = ["", *(f"{index}_{kind}" for index, kind in enumerate(kinds) if index)]
    return [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]


@dataclass(frozen=True)
class SentenceModel:
    """A folder of sentence-transformers, with layers after the pooling."""

    make: Callable[[], tuple[Any, Tokenizer]]
    pooling: str  # lasttoken, mean or cls
    dense: tuple[torch.nn.Sequential, ...] = ()  # of a linear layer and an activation
    normalize: bool = True

    def write(self, folder: Path, **files: Any) -> tuple[Any, Tokenizer]:
        """Write the folder, and return the model and its tokenizer."""
        model, tokenizer = self.make()
        kinds = ["Transformer", "Pooling", *["Dense"] * len(self.dense), *["Normalize"] * self.normalize]
        files |= {"modules.json": modules(*kinds), "1_Pooling/config.json": {"pooling_mode": self.pooling}}
        for index, (linear, function) in enumerate(self.dense, 2):
            files[f"{index}_Dense/config.json"] = {
                "in_features": linear.in_features,
                "out_features": linear.out_features,
                "bias": linear.bias is not None,
                "activation_function": f"{type(function).__module__}.{type(function).__name__}",
            }
        write_folder(folder, model, tokenizer, files)
        for index, layer in enumerate(self.dense, 2):
            tensors = {f"linear.{name}": array for name, array in layer[0].state_dict().items()}
            save_file(tensors, folder / f"{index}_Dense" / "model.safetensors")
        return model, tokenizer

    @torch.no_grad()
    def embed(self, model: Any, ids: list[int]) -> Array:
        """Return the vector that sentence-transformers would compute."""
        base = getattr(model, "model", model)  # of a language model
        hidden = base(torch.tensor([ids])).last_hidden_state[0]
        vector = {"lasttoken": hidden[-1], "mean": hidden.mean(dim=0), "cls": hidden[0]}[self.pooling]
        for layer in self.dense:
            vector = layer(vector)
        return np.asarray((torch.nn.functional.normalize(vector, dim=0) if self.normalize else vector).numpy())


def dense(inputs: int, outputs: int, activation: torch.nn.Module | None = None, *, bias: bool = True) -> Any:
    """Return a random layer after the pooling."""
    generator = torch.Generator().manual_seed(outputs)
    layer = torch.nn.Sequential(torch.nn.Linear(inputs, outputs, bias), activation or torch.nn.Identity())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return layer
