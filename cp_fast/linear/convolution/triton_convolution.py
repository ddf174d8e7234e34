# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
"""A convolution on one rank in Triton: see `ConvolutionKernels`. Nothing is gathered before: kernels read the tables.

The forward pass reads x and writes the result, once each. Neighbouring rows read the same rows, which caches hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.language.extra import libdevice  # pyright: ignore[reportMissingImports]

if TYPE_CHECKING:
    from cp_fast.linear.convolution.convolution_kernels import ConvolutionInputs
    from cp_fast.linear.convolution.halo_tables import ReadTable

__all__ = ["forward", "rows_backward", "sums_backward"]

BLOCK = 32, 128, 4  # rows, channels and warps of a program of _weighted
PART = 16, 64, 4  # and of _sums_backward, at once
_PARTS = 64  # partial sums over rows
_AT_ONCE = 4  # columns of the weight whose gradients one launch sums


@triton.jit
def _row(
    x, halo, slots, near, o_t, o_c, rows, n, arriving, channels: tl.constexpr, step: tl.constexpr, K: tl.constexpr,
    k: tl.constexpr,
):  # fmt: skip
    """The rows of x, or of the halo behind it, that rows o_t read for column k; or zero. near: all read neighbours."""
    m_c = (o_c < channels)[None, :]
    if k >= K:
        found = tl.zeros([o_t.shape[0], o_c.shape[0]], dtype=tl.float32)
    elif near:
        place = x + o_t[:, None] * channels + o_c[None, :] + step * (K - 1 - k) * channels
        found = tl.load(place, mask=(o_t < rows)[:, None] & m_c, other=0.0).to(tl.float32)
    else:
        slot = tl.load(slots + o_t * K + k, mask=o_t < rows, other=n + arriving).to(tl.int64)
        start = tl.where(slot < n, x + slot * channels, halo + (slot - n) * channels)
        found = tl.load(start[:, None] + o_c[None, :], mask=(slot < n + arriving)[:, None] & m_c, other=0.0)
        found = found.to(tl.float32)
    return found


@triton.jit
def _column(weight, o_c, channels: tl.constexpr, by_channel, by_column, K: tl.constexpr, k: tl.constexpr):
    """One column of the weight, in float32."""
    found = tl.load(weight + o_c * by_channel + k * by_column, mask=(o_c < channels) & (k < K), other=0.0)
    return found.to(tl.float32)[None, :]


@triton.jit
def _sigmoid(x):
    return libdevice.fast_dividef(1.0, 1.0 + libdevice.fast_expf(-x))


@triton.jit(do_not_specialize=["rows", "n", "arriving"])
def _weighted(
    x, halo, weight, bias, slots, far, out, rows, n, arriving, by_channel, by_column,
    channels: tl.constexpr, step: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    USE_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """BT rows of BC channels: the sum over columns of the rows that the table names, times weights."""
    blocks: tl.constexpr = (channels + BC - 1) // BC
    first = tl.program_id(0) // blocks * BT
    o_t = (first + tl.arange(0, BT)).to(tl.int64)
    o_c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    near = tl.load(far + first) >= tl.minimum(first + BT, rows)
    sums = tl.zeros([BT, BC], dtype=tl.float32)
    if USE_BIAS:
        sums += tl.load(bias + o_c, mask=o_c < channels, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(K):
        b_x = _row(x, halo, slots, near, o_t, o_c, rows, n, arriving, channels, step, K, k)
        sums += b_x * _column(weight, o_c, channels, by_channel, by_column, K, k)
    if SILU:
        sums *= _sigmoid(sums)
    place = out + o_t[:, None] * channels + o_c[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=(o_t < rows)[:, None] & (o_c < channels)[None, :])


@triton.jit(do_not_specialize=["n", "arriving"])
def _sums_backward(
    x, halo, weight, bias, slots, far, dout, dsums, dweight, dbias, n, arriving, by_channel, by_column,
    channels: tl.constexpr, K: tl.constexpr, FIRST: tl.constexpr, PARTS: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr, USE_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """A part of the rows of BC channels: the gradients of the sums, and sums over the part's rows of those of the bias
    and of four columns of the weight, from column FIRST.
    """
    blocks: tl.constexpr = (channels + BC - 1) // BC
    part = tl.program_id(0) // blocks
    o_c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    m_c = o_c < channels
    w_0 = _column(weight, o_c, channels, by_channel, by_column, K, 0)
    w_1 = _column(weight, o_c, channels, by_channel, by_column, K, 1)
    w_2 = _column(weight, o_c, channels, by_channel, by_column, K, 2)
    w_3 = _column(weight, o_c, channels, by_channel, by_column, K, 3)
    sum_0 = tl.zeros([BT, BC], dtype=tl.float32)
    sum_1 = tl.zeros([BT, BC], dtype=tl.float32)
    sum_2 = tl.zeros([BT, BC], dtype=tl.float32)
    sum_3 = tl.zeros([BT, BC], dtype=tl.float32)
    total = tl.zeros([BT, BC], dtype=tl.float32)
    for i in range(part, tl.cdiv(n, BT), PARTS):
        o_t = (i * BT + tl.arange(0, BT)).to(tl.int64)
        near = tl.load(far + i * BT) >= tl.minimum(i * BT + BT, n)
        place = o_t[:, None] * channels + o_c[None, :]
        mask = (o_t < n)[:, None] & m_c[None, :]
        x_0 = _row(x, halo, slots, near, o_t, o_c, n, n, arriving, channels, -1, K, FIRST)
        x_1 = _row(x, halo, slots, near, o_t, o_c, n, n, arriving, channels, -1, K, FIRST + 1)
        x_2 = _row(x, halo, slots, near, o_t, o_c, n, n, arriving, channels, -1, K, FIRST + 2)
        x_3 = _row(x, halo, slots, near, o_t, o_c, n, n, arriving, channels, -1, K, FIRST + 3)
        if SILU and FIRST > 0:
            d = tl.load(dsums + place, mask=mask, other=0.0)
        else:
            d = tl.load(dout + place, mask=mask, other=0.0).to(tl.float32)
        if SILU and FIRST == 0:
            sums = x_0 * w_0 + x_1 * w_1 + x_2 * w_2 + x_3 * w_3
            for k in tl.static_range(4, K):
                b_x = _row(x, halo, slots, near, o_t, o_c, n, n, arriving, channels, -1, K, k)
                sums += b_x * _column(weight, o_c, channels, by_channel, by_column, K, k)
            if USE_BIAS:
                sums += tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
            gate = _sigmoid(sums)
            d *= gate * (1 + sums * (1 - gate))
            tl.store(dsums + place, d, mask=mask)
        sum_0 += d * x_0
        sum_1 += d * x_1
        sum_2 += d * x_2
        sum_3 += d * x_3
        if USE_BIAS:
            total += d
    dweight += ((K + 3) // 4 * 4 * part + FIRST).to(tl.int64) * channels + o_c
    tl.store(dweight, tl.sum(sum_0, 0), mask=m_c)
    tl.store(dweight + channels, tl.sum(sum_1, 0), mask=m_c)
    tl.store(dweight + 2 * channels, tl.sum(sum_2, 0), mask=m_c)
    tl.store(dweight + 3 * channels, tl.sum(sum_3, 0), mask=m_c)
    if USE_BIAS and FIRST == 0:
        tl.store(dbias + part.to(tl.int64) * channels + o_c, tl.sum(total, 0), mask=m_c)


def forward(inputs: ConvolutionInputs) -> torch.Tensor:
    """See `ConvolutionKernels`."""
    out = torch.empty_like(inputs.x)
    _launch_weighted(inputs.x, inputs.halo, inputs.weight, inputs.bias, inputs.reads, out, inputs.silu)
    return out


def sums_backward(
    inputs: ConvolutionInputs, dout: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See `ConvolutionKernels`. Without an activation the first result is dout."""
    x, halo, reads, weight, bias, silu = inputs
    (n, channels), kernel_size = x.shape, weight.shape[1]
    dsums = torch.empty_like(x, dtype=torch.float32) if silu else dout
    block_rows, block_channels, warps = PART
    parts = min(_PARTS, triton.cdiv(n, block_rows))
    columns = triton.cdiv(kernel_size, _AT_ONCE) * _AT_ONCE
    dweight = x.new_empty(parts, columns, channels, dtype=torch.float32)
    dbias = None if bias is None else x.new_empty(parts, channels, dtype=torch.float32)
    if n:
        with torch.cuda.device_of(x):
            for first in range(0, columns, _AT_ONCE):
                _sums_backward[(parts * triton.cdiv(channels, block_channels),)](
                    x, halo, weight, bias, *reads[:2], dout, dsums, dweight, dbias, n, len(halo), *weight.stride(),
                    channels, kernel_size, first, parts, block_rows, block_channels, bias is not None, silu,
                    num_warps=warps,
                )  # fmt: skip
    of_weight = dweight.sum(0)[:kernel_size].t().to(weight.dtype, memory_format=torch.contiguous_format)
    return dsums, of_weight, None if dbias is None or bias is None else dbias.sum(0).to(bias.dtype)


def rows_backward(read_by: ReadTable, dsums: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `ConvolutionKernels`."""
    found = dsums.new_empty(len(read_by.slots), dsums.shape[1], dtype=dtype)
    _launch_weighted(dsums, dsums[:0], weight, None, read_by, found, silu=False)
    return found


def _launch_weighted(
    x: torch.Tensor,
    halo: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    table: ReadTable,
    out: torch.Tensor,
    silu: bool,
) -> None:
    (rows, channels), (block_rows, block_channels, warps) = out.shape, BLOCK
    if not rows:
        return
    with torch.cuda.device_of(x):
        _weighted[(triton.cdiv(rows, block_rows) * triton.cdiv(channels, block_channels),)](
            x, halo, weight, bias, table.slots, table.far, out, rows, len(x), len(halo), *weight.stride(),
            channels, table.step, weight.shape[1], block_rows, block_channels, bias is not None, silu, num_warps=warps,
        )  # fmt: skip
