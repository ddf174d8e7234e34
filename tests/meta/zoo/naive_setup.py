"""The naive ring, set up for the suite."""

from typing import Any

import torch

from tests.meta.zoo.naive_ring import Flaws, positions, ring


class Naive:
    flaws = Flaws()

    def attention(self, q: Any, k: Any, v: Any, *, cp: Any, return_lse: bool = False, **rest: Any) -> Any:
        rest = {"attn_mask_type": "causal", "window_size": (-1, -1)} | rest
        rest = {name: value for name, value in rest.items() if value is not None and value is not False}
        mask, window, scale = rest.pop("attn_mask_type"), rest.pop("window_size"), rest.pop("softmax_scale", None)
        plain = (rest.pop("qkv_format", ""), cp.layout, cp.cp_comm_type) == ("thd", "dual_chunk", "p2p")
        plain &= rest.pop("softcap", 0.0) == 0.0 and rest.pop("softmax_type", "vanilla") == "vanilla"
        lengths: Any = rest.pop("cu_seqlens_q", torch.tensor([0]))
        rest.pop("deterministic", None)
        padded: Any = rest.pop("cu_seqlens_q_padded", lengths)
        plain &= not bool((padded.diff() % (2 * cp.size)).any())
        if not plain or rest or "bottom" in mask or len(q) != len(k) or q.dtype.itemsize < 4:
            raise NotImplementedError(
                "self attention of packed sequences that divide, in float32 or float64, in the ring alone"
            )
        rows = [positions(lengths.diff().tolist(), padded.diff().tolist(), cp.size, r) for r in range(cp.size)]
        rows = [torch.nn.functional.pad(r, (0, 0, 0, len(q) - len(r)), value=-1) for r in rows]
        empty = (rows[cp.rank][:, 1] < 0)[:, None, None]
        q, k, v = (x.masked_fill(empty, 0.0) for x in (q, k, v))
        window = (window[0], 0 if "causal" in mask else window[1])
        out, lse = ring(cp.group, q, k, v, rows, window, scale or q.shape[2] ** -0.5, self.flaws)
        out = out.masked_fill(empty, 0.0)
        return (out, lse) if return_lse else out
