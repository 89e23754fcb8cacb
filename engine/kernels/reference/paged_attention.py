"""Attention over block tables in torch: gather the row's blocks, then scaled dot products."""

import torch
import torch.nn.functional as F

from loraplex.engine.kernels.prefill_chunks import PrefillChunks


def decode_attention(
    qkv: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """One query per row over its `lengths[row]` cached tokens, the row's own included.

    qkv [rows, (heads + 2 kv_heads) * size] with q first, out [rows, heads * size], block_tables [rows, columns]
    and lengths [rows] int32; `window` keeps the last `window` tokens only. A cache of float8_e4m3fn holds k and v
    over their `kv_scales`; another type has none. A row of length 0 is no decode: it is neither read nor written.
    """
    for row, length in enumerate(lengths.tolist()):
        if length:
            rows = slice(row, row + 1)
            _attend(qkv[rows], out[rows], kv_cache, block_tables[row], length, scale, window, kv_scales)


def prefill_attention(
    qkv: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    chunks: PrefillChunks,
    scale: float,
    window: int | None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Each chunk's rows are the last of its sequence's `lengths` cached tokens, each row causal.

    qkv and out have all rows of the step. Rows of no chunk are neither read nor written. The rest is as for decodes.
    """
    shapes = zip(chunks.begins.tolist(), chunks.ends.tolist(), chunks.lengths.tolist(), strict=True)
    for (begin, end, length), table in zip(shapes, chunks.tables, strict=True):
        if begin < end:
            rows = slice(begin, end)
            _attend(qkv[rows], out[rows], kv_cache, table, length, scale, window, kv_scales)


def _attend(
    qkv: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    length: int,
    scale: float,
    window: int | None,
    kv_scales: tuple[float, float],
) -> None:
    """Compute the last `qkv.shape[0]` of `length` tokens of one sequence."""
    chunk = qkv.shape[0]
    block_size, kv_heads, size = kv_cache.shape[1], kv_cache.shape[3], kv_cache.shape[4]
    heads = out.shape[1] // size
    blocks = block_table[: -(-length // block_size)]
    kv = _gathered(kv_cache, blocks, qkv.dtype).view(-1, 2, kv_heads, size)[:length]
    # [kv_heads, length, size], each repeated for the query heads of its group
    k, v = (kv[:, i].transpose(0, 1).repeat_interleave(heads // kv_heads, dim=0) for i in (0, 1))
    q = qkv[:, : heads * size].view(chunk, heads, size).transpose(0, 1)
    causal = chunk == length and window is None
    mask = None if causal else _mask(chunk, length, window, qkv.device)
    key_scale, value_scale = kv_scales
    attended = F.scaled_dot_product_attention(
        q.unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        attn_mask=mask,
        is_causal=causal,
        scale=scale * key_scale,
    )
    if value_scale != 1.0:
        attended *= value_scale
    out.view(chunk, heads, size).copy_(attended[0].transpose(0, 1))


def _gathered(kv_cache: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if kv_cache.dtype is not torch.float8_e4m3fn:
        return kv_cache.index_select(0, blocks)
    # As bytes: torch cannot index values of this type. Each value is exact in the wider type.
    return kv_cache.view(torch.uint8).index_select(0, blocks).view(kv_cache.dtype).to(dtype)


def _mask(chunk: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
    query = torch.arange(length - chunk, length, device=device).unsqueeze(1)
    key = torch.arange(length, device=device).unsqueeze(0)
    visible = key <= query
    return visible if window is None else visible & (key > query - window)
