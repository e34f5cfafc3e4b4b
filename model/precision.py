"""Device and precision: matrix products in bfloat16 on request, everything else in float32."""

import torch
from torch import Tensor


def default_device() -> torch.device:
    """Return the GPU if PyTorch can use one, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return an autocast context that computes matrix products in "bfloat16", or "float32" (off).
    Weights, their gradients and sums stay float32 (Micikevicius et al. 2018).
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def product_type(x: Tensor) -> torch.dtype:
    """Return the type of autocast's products on the tensor's device, or the tensor's own type."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def at_least_float32(x: Tensor) -> Tensor:
    """Convert bfloat16 and float16 to float32, for operations that need the precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
