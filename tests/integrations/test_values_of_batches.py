"""Integers of every dtype in a batch, and the values that fill tensors up: what a dtype does not hold is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import cp_fast
from cp_fast.integrations.token_batches import shard_tokens
from cp_ref import SimGroup
from tests.integrations.test_shard_tokens import IDS, packed, with_mask

FLOAT8, UINT16 = torch.float8_e4m3fn, torch.uint16
FILLS: list[tuple[torch.dtype, Any, str]] = [
    (torch.int64, 0.5, "is 0.5, but .* has dtype torch.int64; it must be an integer"),
    (torch.int64, math.nan, "is nan, but .* it must be an integer"),
    (torch.int64, True, "is True; it must be a number"),
    (torch.int64, None, "is None; it must be a number"),
    (torch.uint8, -1, "is -1; of dtype torch.uint8 it must be from 0 to 255"),
    (torch.uint8, 300, "is 300; of dtype"),
    (torch.int32, 2**40, "is 1099511627776; of dtype"),
    (torch.bool, 2, "is 2; of dtype torch.bool it must be from 0 to 1"),
    (torch.float16, 1e10, "is 10000000000.0; of dtype torch.float16 it must be from -65504.0 to 65504.0"),
    (torch.float16, 1e-9, "is 1e-09, which would be 0"),
    (torch.float32, 10**400, "is an integer of 1329 bits; of dtype"),
    (torch.bfloat16, 257, "is 257, which .* of dtype torch.bfloat16 does not hold; give a float to round it"),
    (FLOAT8, 500, "is 500; of dtype torch.float8_e4m3fn it must be from -448.0 to 448.0"),
    (FLOAT8, math.inf, "is inf; of dtype"),
    *((dtype, value, "") for dtype, value in ((FLOAT8, -1.0), (torch.float8_e5m2, math.inf), (torch.float16, 0.1))),
    *((dtype, value, "") for dtype, value in ((UINT16, 65535), (torch.uint64, 2**64 - 1), (torch.int64, 2.0))),
    *((dtype, value, "") for dtype, value in ((torch.bool, True), (torch.float32, math.nan), (torch.uint32, 7))),
]


@pytest.mark.parametrize(("dtype", "value", "says"), FILLS)
def test_padding_is_what_the_dtype_holds(dtype: torch.dtype, value: Any, says: str) -> None:
    """By `fill`, of which other ranks are told, and by `cp_batch.shard` and `shard`."""
    x = torch.arange(2).expand(1, 5, 2).to(dtype)

    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member, layout="contiguous")
        given = {"input_ids": IDS[:1, :5], "x": x}
        if says:
            with pytest.raises((ValueError, TypeError), match=rf"fill\['x'\] {says}"):
                shard_tokens(given, cp=cp, fill={"x": value if member.rank == 1 else 0})
        part = shard_tokens(given, cp=cp, fill={"x": 0 if says else value})
        for call in (part["cp_batch"].shard, lambda x, fill_value: cp_fast.shard(x, cp=cp, fill_value=fill_value)):
            if says:
                with pytest.raises((ValueError, TypeError), match=f"fill_value {says}"):
                    call(x, fill_value=value)
            else:
                found = call(x, fill_value=value)
                assert torch.equal(found.view(torch.uint8), part["x"].view(torch.uint8))
                if member.rank == 2:
                    wanted = torch.full((1, 1, 2), value, dtype=dtype)
                    assert torch.equal(found[:, 1:].view(torch.uint8), wanted.view(torch.uint8))

    SimGroup(3).run(one)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int32])
@pytest.mark.parametrize("layout", ["dual_chunk", "balanced"])
def test_integers_of_every_dtype_are_taken(dtype: torch.dtype, layout: Any) -> None:
    rows = packed(0, 1, 2, 0, 1) | {"labels": torch.arange(5)[None]}, with_mask([1, 1, 1, 0, 0])

    def one(member: Any) -> list[dict[str, Any]]:
        cp = cp_fast.ContextParallel(member, layout=layout)
        given = [{name: x.to(kind) for name, x in one.items()} for one in rows for kind in (torch.int64, dtype)]
        return [shard_tokens(each, cp=cp, pad_token_id=100) for each in given]

    for found in SimGroup(2).run(one):
        for wide, narrow in zip(found[::2], found[1::2], strict=True):
            assert narrow["input_ids"].dtype == dtype
            for name in {*wide} - {"cp_batch"}:
                assert torch.equal(wide[name], narrow[name].to(torch.int64)), name


def test_a_label_beyond_int64_is_refused() -> None:
    labels = torch.full((1, 8), 2**64 - 100, dtype=torch.uint64)

    def one(member: Any) -> None:
        with pytest.raises(ValueError, match="labels has 18446744073709551516; it must be at most"):
            shard_tokens({"input_ids": IDS[:1], "labels": labels}, cp=cp_fast.ContextParallel(member))

    SimGroup(2).run(one)
