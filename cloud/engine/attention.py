"""Attention over paged KV, in the order of a step's rows."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["attend_chunk", "attend_decodes", "lower_right_mask"]


def attend_chunk(query: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention of the last n positions of one request.

    Args:
        query: [n, heads, head_dim], rotated.
        kv: [length, 2·kv_heads, head_dim]: keys, then values, of all `length`
            positions up to and including the last query's.
        mask: `lower_right_mask(n, length)`; None for n = 1 or n = length.

    Returns:
        [n, heads, head_dim].
    """
    num, heads, head_dim = query.shape
    length = kv.shape[0]
    kv_heads = kv.shape[1] // 2
    group = heads // kv_heads
    key, value = kv.transpose(0, 1).chunk(2)  # [kv_heads, length, head_dim] each.
    # One "batch" entry per KV head; its keys are shared by a stride of zero.
    out = scaled_dot_product_attention(
        query.view(num, kv_heads, group, head_dim).permute(1, 2, 0, 3),
        key.unsqueeze(1).expand(-1, group, -1, -1),
        value.unsqueeze(1).expand(-1, group, -1, -1),
        attn_mask=mask,
        is_causal=mask is None and num == length,
    )
    return out.permute(2, 0, 1, 3).reshape(num, heads, head_dim)


def attend_decodes(query: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention of one new position of each of several requests.

    The heads that share keys are folded into the query length, so that KV is
    read once.

    Args:
        query: [n, heads, head_dim], rotated.
        kv: [n, length, 2·kv_heads, head_dim]: keys, then values, each request's
            own and then anything finite.
        mask: [n, 1, 1, length], 0 for a request's own positions, −inf for
            others; None where all are its own.

    Returns:
        [n, heads, head_dim].
    """
    num, heads, head_dim = query.shape
    kv_heads = kv.shape[2] // 2
    key, value = kv.transpose(1, 2).chunk(2, dim=1)  # [n, kv_heads, length, head_dim] each.
    folded = query.view(num, kv_heads, heads // kv_heads, head_dim)
    out = scaled_dot_product_attention(folded, key, value, attn_mask=mask)
    return out.reshape(num, heads, head_dim)


def lower_right_mask(
    num: int, length: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Additive causal mask [num, length] of the last `num` of `length` positions.

    A chunk that has context before it sees all of that context: the diagonal
    ends in the lower right corner. (`is_causal` alone starts it in the upper
    left one, which is right only where there is no context, and silently wrong
    elsewhere.) None where no mask is needed.
    """
    if num == 1 or num == length:
        return None
    mask = torch.full((num, length), float("-inf"), dtype=dtype, device=device)
    return mask.triu_(diagonal=length - num + 1)
