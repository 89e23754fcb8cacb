"""Per-head norm, rotary embedding and KV write in torch."""

import torch

from loraplex.engine.kernels.reference.rms_norm import rms_norm


def rotary_write_kv(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Normalise and rotate q and k of `qkv` [tokens, (heads + 2 kv_heads) * size] in place, then write k and v.

    kv_cache [blocks, block_size, 2, kv_heads, size]; `slots` [tokens] int64 index its first two axes flattened; `rope` is
    (cos, sin), fp32 [positions, half], or None for a layer without positions; pairs are (i, i + half). A cache of
    float8_e4m3fn gets k and v divided by their `kv_scales`, rounded to the nearest, at most 448 in size; non-finite values
    become NaN.
    """
    kv_heads, size = kv_cache.shape[3], kv_cache.shape[4]
    heads = qkv.view(qkv.shape[0], -1, size)
    q, k = heads[:, : -2 * kv_heads], heads[:, -2 * kv_heads : -kv_heads]
    if norms is not None:
        q.copy_(rms_norm(q, None, norms[0], epsilon))
        k.copy_(rms_norm(k, None, norms[1], epsilon))
    if rope is not None:
        cos, sin = (table[positions].unsqueeze(1) for table in rope)
        _rotate(q, cos, sin)
        _rotate(k, cos, sin)
    kv = heads[:, -2 * kv_heads :].view(-1, 2, kv_heads, size)
    if kv_cache.dtype is torch.float8_e4m3fn:
        # As bytes: torch cannot write values of this type by index.
        kv, kv_cache = e4m3(kv, kv_scales).view(torch.uint8), kv_cache.view(torch.uint8)
    kv_cache.view(-1, 2, kv_heads, size)[slots] = kv


def e4m3(kv: torch.Tensor, kv_scales: tuple[float, float]) -> torch.Tensor:
    """Convert k and v [..., 2, kv_heads, size] to 8 bits."""
    inverses = torch.tensor([1 / scale for scale in kv_scales], dtype=torch.float32, device=kv.device)
    values = kv.float() * inverses.view(2, 1, 1)
    largest = torch.finfo(torch.float8_e4m3fn).max
    return torch.where(values.isfinite(), values.clamp(-largest, largest), torch.nan).to(torch.float8_e4m3fn)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = cos.shape[-1]
    first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
    # Compute both halves before either is written: in fp32 `first` and `second` are views of `heads`.
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    heads[..., : 2 * half] = rotated.to(heads.dtype)
