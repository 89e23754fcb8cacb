"""Attention over block tables in torch: gather the row's blocks, then scaled dot products.

Invariant: a row's result follows from its place, its query and the keys before it. Prompts are computed in whole tiles that
are counted from the sequence's begin: the products of a place always have the same shape.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F

from loraplex.engine.kernels.prefill_chunks import PrefillChunks

TILE_ROWS = 32
"""Queries of a tile. More waste work where a chunk begins behind a cached prefix; with fewer, long prompts slow down."""


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
            first = 0 if window is None else max(0, length - window)
            keys = _keys(kv_cache, block_tables[row], length, length, qkv.dtype)[:, :, first:]
            attended = _attend(qkv[row : row + 1, : out.shape[1]], keys, None, scale, kv_scales)
            out[row] = attended.flatten()


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
            q, attended = qkv[begin:end, : out.shape[1]], out[begin:end]
            _attend_in_tiles(q, attended, kv_cache, table, length, scale, window, kv_scales)


def _attend_in_tiles(
    q: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    length: int,
    scale: float,
    window: int | None,
    kv_scales: tuple[float, float],
) -> None:
    """Compute the last `q.shape[0]` of `length` tokens of one sequence. Rows of a tile that lie outside are zeros."""
    first = length - q.shape[0]
    begin, end = first // TILE_ROWS * TILE_ROWS, -(-length // TILE_ROWS) * TILE_ROWS
    keys = _keys(kv_cache, block_table, length, end, q.dtype)
    mask = _mask(1 << (end - 1).bit_length(), window, q.dtype, q.device)
    tiles = torch.split(F.pad(q, (0, 0, first - begin, end - length)), TILE_ROWS)
    by_head = out.view(len(out), keys.shape[1], -1, keys.shape[3])
    for start, tile in zip(range(begin, end, TILE_ROWS), tiles, strict=True):
        stop = start + TILE_ROWS
        attended = _attend(tile, keys[:, :, :stop], mask[:, mask.shape[1] - stop :], scale, kv_scales)
        low, high = max(first, start), min(length, stop)
        by_head[low - first : high - first] = attended[low - start : high - start]


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    kv_scales: tuple[float, float],
) -> torch.Tensor:
    """q [rows, heads * size], keys as `_keys` gives them, mask [rows, length] -> [rows, kv_heads, heads of a group, size]."""
    _, kv_heads, _, size = keys.shape
    # [heads of a group, kv_heads, rows, size]: the group shares K and V without a copy
    grouped = q.view(len(q), kv_heads, -1, size).permute(2, 1, 0, 3)
    k, v = keys.unsqueeze(1).expand(-1, len(grouped), -1, -1, -1)
    key_scale, value_scale = kv_scales
    attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale * key_scale)
    if value_scale != 1.0:
        attended *= value_scale
    return attended.permute(2, 1, 0, 3)


def _keys(
    kv_cache: torch.Tensor, block_table: torch.Tensor, length: int, padded: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return K and V [2, kv_heads, padded, size] of one sequence, zero from `length` on: a block's rest may hold NaN."""
    blocks = block_table[: -(-length // kv_cache.shape[1])]
    kv = _gathered(kv_cache, blocks, dtype).flatten(0, 1)[:length]
    return F.pad(kv, (0, 0, 0, 0, 0, 0, 0, padded - length)).permute(1, 2, 0, 3)


def _gathered(kv_cache: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if kv_cache.dtype is not torch.float8_e4m3fn:
        return kv_cache.index_select(0, blocks)
    # As bytes: torch cannot index values of this type. Each value is exact in the wider type.
    return kv_cache.view(torch.uint8).index_select(0, blocks).view(kv_cache.dtype).to(dtype)


@lru_cache(maxsize=32)
def _mask(keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return [TILE_ROWS, keys], 0 for the visible ones of the last `keys` keys of a tile, else -inf."""
    query = torch.arange(keys - TILE_ROWS, keys, device=device).unsqueeze(1)
    key = torch.arange(keys, device=device).unsqueeze(0)
    hidden = key > query if window is None else (key > query) | (key <= query - window)
    return torch.zeros(TILE_ROWS, keys, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
