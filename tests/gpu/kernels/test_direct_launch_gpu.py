"""Direct launches of Triton kernels on a GPU: the bits of launches by Triton, for every kind of argument in turn."""

from __future__ import annotations

from itertools import product

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_same_kernels_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from cp_fast.linear.fla.kernels import map_kernels

    draw = torch.Generator("cuda").manual_seed(1)

    def some(shift: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Its first number lies `shift` numbers behind memory that is aligned."""
        numbers = torch.randn(torch.Size(shape).numel() + shift, generator=draw, device="cuda").to(dtype)
        return numbers[shift:].view(shape) / 10

    cases = product((torch.bfloat16, torch.float16), (0, 1), (32, 40), (True, False), ([[0, 150]], [[0, 70], [3, 4]]))
    for dtype, shift, d_k, with_w, spans in cases:
        k, w = some(shift, dtype, 150, 2, d_k), some(0, dtype, 150, 2, d_k) if with_w else None
        u, g = some(shift, dtype, 150, 2, 32), -some(0, torch.float32, 150, 2).abs()
        table = torch.tensor(spans, device="cuda")
        found = []
        for direct in (False, True, True):
            with monkeypatch.context() as patch:
                patch.setattr(map_kernels._forward_maps, "_direct", direct)
                found.append(map_kernels.forward_maps(k, w, u, table, g=g))
        for again in found[1:]:
            for one, other in zip(found[0], again, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert map_kernels._forward_maps._compiled
