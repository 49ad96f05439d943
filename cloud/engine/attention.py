"""Attention of one request's rows over its own KV rows; no padding anywhere."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["attend", "lower_right_mask"]


def attend(query: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention of the last n positions of a request.

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
    if num == 1:
        # The group's heads read the same keys: fold them into the query length.
        folded = query.view(1, kv_heads, group, head_dim)
        out = scaled_dot_product_attention(folded, key.unsqueeze(0), value.unsqueeze(0))
        return out.view(1, heads, head_dim)
    # One "batch" entry per KV head; its keys are shared by a stride of zero.
    out = scaled_dot_product_attention(
        query.view(num, kv_heads, group, head_dim).permute(1, 2, 0, 3),
        key.unsqueeze(1).expand(-1, group, -1, -1),
        value.unsqueeze(1).expand(-1, group, -1, -1),
        attn_mask=mask,
        is_causal=mask is None and num == length,
    )
    return out.permute(2, 0, 1, 3).reshape(num, heads, head_dim)


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
