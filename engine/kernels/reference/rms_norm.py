"""RMSNorm in torch with the Llama family's rounding: the residual in its own type, the norm in fp32."""

import torch


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Norm of x, or of residual += x (in place) when there is a residual. All [rows, hidden]."""
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (normal * weight.float()).to(x.dtype)
