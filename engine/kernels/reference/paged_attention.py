"""Attention over block tables in torch: gather the row's blocks, then scaled dot products."""

import torch
import torch.nn.functional as F


def decode_attention(
    qkv: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
) -> None:
    """One query per row over its `lengths[row]` cached tokens, the row's own included.

    qkv [rows, (heads + 2 kv_heads) * size] with q first, out [rows, heads * size], block_tables [rows, columns]
    and lengths [rows] int32; `window` keeps the last `window` tokens only.
    """
    for row in range(out.shape[0]):
        prefill_attention(
            qkv[row : row + 1],
            out[row : row + 1],
            kv_cache,
            block_tables[row],
            int(lengths[row]),
            scale,
            window,
        )


def prefill_attention(
    qkv: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    length: int,
    scale: float,
    window: int | None,
) -> None:
    """A chunk of one sequence: its queries are the last `qkv.shape[0]` of `length` cached tokens, each causal."""
    chunk = qkv.shape[0]
    block_size, kv_heads, size = kv_cache.shape[1], kv_cache.shape[3], kv_cache.shape[4]
    heads = out.shape[1] // size
    blocks = block_table[: -(-length // block_size)]
    kv = kv_cache.index_select(0, blocks).view(-1, 2, kv_heads, size)[:length]
    # [kv_heads, length, size], each repeated for the query heads of its group
    k, v = (kv[:, i].transpose(0, 1).repeat_interleave(heads // kv_heads, dim=0) for i in (0, 1))
    q = qkv[:, : heads * size].view(chunk, heads, size).transpose(0, 1)
    causal = chunk == length and window is None
    mask = None if causal else _mask(chunk, length, window, qkv.device)
    attended = F.scaled_dot_product_attention(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), attn_mask=mask, is_causal=causal, scale=scale
    )
    out.view(chunk, heads, size).copy_(attended[0].transpose(0, 1))


def _mask(chunk: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
    query = torch.arange(length - chunk, length, device=device).unsqueeze(1)
    key = torch.arange(length, device=device).unsqueeze(0)
    visible = key <= query
    return visible if window is None else visible & (key > query - window)
