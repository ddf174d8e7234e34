"""What the benchmark of masks compares with: attention written out is the oracle's, for each of its masks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from benchmarks import masks
from cp_ref import dense_attention

ROWS = 128


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    with patch.multiple(masks, PROMPT=16, ANSWER=8, BLOCK=8, FIRST=4, WINDOW=16):
        yield
    dist.destroy_process_group()


def test_written_out_is_the_oracle(alone: None) -> None:
    job = masks.Job(1, ROWS, tuple(masks.MASKS), (), (), 1, 1, 0.0, heads_q=4, heads_kv=2, dim=8)
    generator = torch.Generator().manual_seed(0)
    heads = {"q": 4, "k": 2, "v": 2, "dout": 4}
    x = {name: torch.randn(ROWS, n, 8, generator=generator) for name, n in heads.items()}
    for name, (maker, _) in masks.MASKS.items():
        q, k, v = (x[n].double().requires_grad_() for n in "qkv")
        cu = torch.tensor([0, ROWS], dtype=torch.int32)
        out, _, _ = dense_attention(q, k, v, qkv_format="thd", areas=maker(ROWS), cu_seqlens_q=cu)
        expected = [out.detach(), *torch.autograd.grad(out, (q, k, v), x["dout"].double())]
        assert masks.worst_error(expected, masks.written_out(job, name, x)) < 1e-5, name
