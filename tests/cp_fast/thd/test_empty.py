"""Batches without any token of any sequence, in buffers that are all tail, by every implementation that runs here."""

from __future__ import annotations

import pytest
import torch

import cp_fast
from cp_fast.movers import use
from tests.marks import needs_cxx

CU = torch.tensor([0, 0, 0], dtype=torch.int32)


@pytest.mark.parametrize("name", ["torch", pytest.param("native", marks=needs_cxx)])
@pytest.mark.parametrize("only_second_half", [False, True])
def test_a_padded_lse_without_room_changes_nothing(name: str, only_second_half: bool) -> None:
    out, step = torch.arange(24.0).reshape(4, 2, 3), torch.full((2 if only_second_half else 4, 2, 3), torch.nan)
    lse, before = torch.empty(2, 2, 0), out.clone()
    with use(name):
        cp_fast.thd.thd_second_half_lse_correction(lse, lse.clone(), CU, lse_packed=False)
        cp_fast.thd.thd_out_correction(out, step, lse, lse.clone(), CU, only_second_half, lse_packed=False)
        assert cp_fast.thd.thd_read_second_half_lse(lse, CU, False, 0).shape == (2, 2, 0)
    assert torch.equal(out, before)
