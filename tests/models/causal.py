"""Plain causal attention as an attention context: one sequence, no cache. For tests of models."""

import torch


class CausalAttention:
    """Attends inside one step that holds a whole sequence from its first token."""

    def attend(
        self,
        layer_idx: int,
        q: torch.Tensor,  # [T, Hq, D]
        k: torch.Tensor,  # [T, Hk, D]
        v: torch.Tensor,  # [T, Hk, D]
        *,
        scale: float,
        window: int,
        soft_cap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        assert soft_cap == 0.0
        assert sinks is None
        rows = torch.arange(q.shape[0])
        back = rows[:, None] - rows[None, :]
        mask = (back >= 0) & (back < window) if window else back >= 0
        groups = q.shape[1] // k.shape[1]
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1),
            k.transpose(0, 1).repeat_interleave(groups, dim=0),
            v.transpose(0, 1).repeat_interleave(groups, dim=0),
            attn_mask=mask,
            scale=scale,
        )
        return out.transpose(0, 1).contiguous()
