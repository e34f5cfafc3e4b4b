"""Convert Sightline's Transformer to a MarianMTModel of Hugging Face transformers.

Marian is a post-norm encoder-decoder with tied embeddings, too. It orders its sinusoids differently
and has a configurable activation, so both are set to match.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sightline.export.tokenizers.sentencepiece import SentencePieceModel
from sightline.model.architectures.transformer import Transformer
from sightline.model.data.tokenizer_training import BOS, EOS, PAD
from tests.export.tokenizers.writing import special_pieces, unigram_pieces, write_sentencepiece


def to_marian(model: Transformer) -> Any:
    """Return the same model as a MarianMTModel, in evaluation mode."""
    from transformers import MarianConfig, MarianMTModel

    config = model.config
    marian = MarianMTModel(
        MarianConfig(
            vocab_size=config.vocab_size,
            d_model=config.d_model,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            encoder_attention_heads=config.num_heads,
            decoder_attention_heads=config.num_heads,
            encoder_ffn_dim=config.d_ff,
            decoder_ffn_dim=config.d_ff,
            max_position_embeddings=config.max_positions,
            activation_function="relu",
            scale_embedding=True,
            pad_token_id=config.pad_id,
            bos_token_id=config.bos_id,
            eos_token_id=config.eos_id,
            decoder_start_token_id=config.bos_id,
            forced_eos_token_id=None,
        )
    )
    marian.load_state_dict(_marian_state(model))
    return marian.eval()


def save_marian(model: Transformer, words: Sequence[str], folder: Path) -> None:
    """Write the same model as the folder of a MarianMTModel, with a tokenizer of words."""
    to_marian(model).save_pretrained(folder)
    file = folder / "model.safetensors"
    # transformers leaves out the positions, because it computes those of Marian's own order.
    positions = {f"model.{side}.embed_positions.weight": model.positions.clone() for side in ("encoder", "decoder")}
    save_file({**load_file(file), **positions}, file, metadata={"format": "pt"})
    pieces = [f"▁{word}" for word in words]
    vocabulary = [PAD, BOS, EOS, "<unk>", "▁", *pieces]
    vocabulary += [f"<{id_}>" for id_ in range(len(vocabulary), model.config.vocab_size)]
    ids = {token: id_ for id_, token in enumerate(vocabulary)}
    (folder / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    sentencepiece = SentencePieceModel(special_pieces("<unk>", BOS, EOS) + unigram_pieces("▁", *pieces))
    for name in ("source.spm", "target.spm"):
        (folder / name).write_bytes(write_sentencepiece(sentencepiece))


def _marian_state(model: Transformer) -> dict[str, Tensor]:
    embedding, config = model.embedding.weight, model.config
    state = {
        "final_logits_bias": torch.zeros(1, config.vocab_size),
        "lm_head.weight": embedding,
        "model.shared.weight": embedding,
    }
    names = {
        "self_attention_norm.norm": "self_attn_layer_norm",
        "cross_attention_norm.norm": "encoder_attn_layer_norm",
        "feed_forward_norm.norm": "final_layer_norm",
        "feed_forward.inner": "fc1",
        "feed_forward.outer": "fc2",
    }
    for ours, theirs in (("self_attention", "self_attn"), ("cross_attention", "encoder_attn")):
        for part, short in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "out")):
            names[f"{ours}.{part}"] = f"{theirs}.{short}_proj"
    for side in ("encoder", "decoder"):
        state[f"model.{side}.embed_tokens.weight"] = embedding
        state[f"model.{side}.embed_positions.weight"] = model.positions
        for number, layer in enumerate(getattr(model, side)):
            for name, tensor in layer.state_dict().items():
                module, _, kind = name.rpartition(".")
                state[f"model.{side}.layers.{number}.{names[module]}.{kind}"] = tensor
    return state
