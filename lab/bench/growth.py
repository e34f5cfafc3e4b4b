"""Enlarge a trained Transformer so that it computes nearly the same: Net2Net (Chen et al. 2016).

Speed depends on a model's sizes and on the lengths of its outputs, not on how it was trained.
Training 6 + 6 layers of width 512 until the outputs have natural lengths takes a night on two
cores; enlarging a trained model takes a second.
"""

import torch
from torch import Tensor

from sightline.model.architectures.transformer import Transformer
from sightline.model.config import TransformerConfig


def grow(small: Transformer, config: TransformerConfig) -> Transformer:
    """Return a larger model with nearly the same outputs, in evaluation mode.

    Features, heads and inner units are repeated; added layers pass on their input. The outputs
    differ slightly because a repeated feature gets the position encoding of its new index, which
    changes the statistics of the first layers' norms. Each size of `config` is a multiple of the
    old one, and it has at least as many layers, and the same vocabulary, number of positions and
    special tokens.
    """
    old, large = small.config, Transformer(config).eval()
    copies = config.d_model // old.d_model
    pairs = torch.arange(config.d_model) // 2  # a sine and a cosine of the same frequency
    # The old feature, head and unit that each new one repeats. Pair `copies * i` of the new
    # position encoding has the frequency of the old pair i. Only that copy is read.
    feature = 2 * (pairs // copies) + torch.arange(config.d_model) % 2
    is_read = (pairs % copies == 0).float()
    heads, size = torch.arange(config.num_heads) % old.num_heads, torch.arange(config.head_size) % old.head_size
    in_head = (heads[:, None] * old.head_size + size).flatten()
    unit = torch.arange(config.d_ff) % old.d_ff
    rows = {"query": in_head, "key": in_head, "value": in_head, "inner": unit}  # all others give features
    columns = {"output": in_head, "outer": unit}  # all others read features
    # Embeddings are multiplied by the square root of the width, but the vocabulary projection is
    # not scaled.
    shrink = float(copies**-0.5)
    # The dot product of longer heads sums more terms and is divided by the square root of the size.
    scale = (old.head_size / config.head_size) ** 0.25

    def grown(module: str, tensor: Tensor) -> Tensor:
        if module == "embedding":
            return tensor[:, feature] * shrink
        repeated: Tensor = tensor[rows.get(module, feature)] * (scale if module in ("query", "key") else 1)
        if tensor.dim() == 2:
            repeated = repeated[:, columns.get(module, feature)]
            # The sum over the columns stays the same.
            repeated = repeated * (tensor.size(1) / repeated.size(1) if module in columns else is_read)
        return repeated

    state = large.state_dict() | {
        name: grown(name.split(".")[-2], tensor) for name, tensor in small.state_dict().items()
    }
    for stack, before, after in (
        ("encoder", old.encoder_layers, config.encoder_layers),
        ("decoder", old.decoder_layers, config.decoder_layers),
    ):
        for number in range(before, after):
            for part in ("self_attention.output", "cross_attention.output", "feed_forward.outer"):
                if (name := f"{stack}.{number}.{part}.weight") in state:
                    state[name] = torch.zeros_like(state[name])
        # A norm of an already normalized input changes nothing, so that the gain and bias of the
        # last old layer move to the last layer.
        for kind, neutral in (("weight", 1.0), ("bias", 0.0)):
            first, last = (f"{stack}.{count - 1}.feed_forward_norm.norm.{kind}" for count in (before, after))
            norm = state[first]
            state[first] = torch.full_like(norm, neutral)
            # The projection sums `copies` equal features, each scaled down with the embedding.
            state[last] = norm if stack == "encoder" else norm * shrink
    large.load_state_dict(state)
    return large
