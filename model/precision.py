"""Mixed precision: products in bfloat16 for runs that ask for it, everything else in float32."""

import torch
from torch import Tensor


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Products in the given precision; weights, their gradients and sums stay float32 (Micikevicius et al. 2018)."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def product_type(x: Tensor) -> torch.dtype:
    """What autocast computes products of a tensor's device in; its own type where autocast is off."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def at_least_float32(x: Tensor) -> Tensor:
    """Where bfloat16 is too coarse, or slow."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
