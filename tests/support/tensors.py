"""Weights of checkpoints in memory."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import nn

from sightline.export.sources.opened_checkpoint import StoredTensor, Tensors


def tensors_of(arrays: Mapping[str, NDArray[np.float32]]) -> Tensors:
    return Tensors({name: StoredTensor(array.shape, array.view) for name, array in arrays.items()})


def state_tensors(module: nn.Module) -> Tensors:
    """Return the parameters of a module by their names in `state_dict`."""
    return tensors_of({name: tensor.detach().cpu().numpy() for name, tensor in module.state_dict().items()})
