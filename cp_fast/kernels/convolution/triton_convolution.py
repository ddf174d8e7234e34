# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false
"""A convolution on one rank in Triton: see `ConvolutionKernels`. Nothing is gathered before the kernels."""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.language.extra import libdevice  # pyright: ignore[reportMissingImports]

from cp_fast.kernels.convolution.torch_convolution import ConvolutionInputs

__all__ = [
    "backward",
    "backward_kernel",
    "edges_backward",
    "edges_kernel",
    "forward",
    "forward_kernel",
]

# ---- kernels
#
# Triton kernels of convolutions. Each reads x (and dout) and writes its result about once: rows that the next rows
# need too stay in registers.
#
# A program has a block of rows and of channels, and goes through the runs of these rows. It reads a run as it lies, and
# the kernel_size - 1 rows before it and behind it from their slots: see `Reads`.
#
# legend   K = kernel_size, BR, BC = rows and channels of a program, BU = rows whose loads are in flight together


@triton.jit
def _columns(weight, o_c, m_c, by_channel, by_column, K: tl.constexpr):
    """The columns of the weight, in float32."""
    found = ()
    for k in tl.static_range(K):
        column = tl.load(weight + o_c * by_channel + k * by_column, mask=m_c, other=0.0)
        found += (column.to(tl.float32),)
    return found


@triton.jit
def _held(x, halo, slot, n, arriving, o_c, m_c, channels: tl.constexpr):
    """The row of x, or of the halo behind it, in a slot; or zero."""
    place = tl.where(slot < n, x + slot.to(tl.int64) * channels, halo + (slot - n).to(tl.int64) * channels)
    return tl.load(place + o_c, mask=(slot < n + arriving) & m_c, other=0.0).to(tl.float32)


@triton.jit
def _sigmoid(x):
    return libdevice.fast_dividef(1.0, 1.0 + tl.exp2(x * -1.4426950408889634))  # log2(e)


@triton.jit
def _gradient(dout, sums, SILU: tl.constexpr):
    """The gradient of sums before the activation."""
    if SILU:
        gate = _sigmoid(sums)
        dout *= gate * (1 + sums * (1 - gate))
    return dout


@triton.jit(do_not_specialize=["n", "arriving"])
def forward_kernel(
    x, halo, weight, bias, reads, stops, out, n, arriving, by_channel, by_column,
    channels: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, BU: tl.constexpr,
    USE_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """BR rows of BC channels, run by run: the sum over columns of the rows that each row reads, times weights."""
    blocks: tl.constexpr = (channels + BC - 1) // BC
    row = tl.program_id(0) // blocks * BR
    end = tl.minimum(row + BR, n)
    o_c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    m_c = o_c < channels
    columns = _columns(weight, o_c, m_c, by_channel, by_column, K)
    first = tl.zeros([BC], dtype=tl.float32)
    if USE_BIAS:
        first = tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    while row < end:
        stop = tl.minimum(tl.load(stops + row), end)
        window = ()
        for k in tl.static_range(K - 1):
            window += (_held(x, halo, tl.load(reads + row * K + k), n, arriving, o_c, m_c, channels),)
        here = row.to(tl.int64) * channels
        for t in range(row, stop, BU):
            rows = window
            for u in tl.static_range(BU):
                held = tl.load(x + here + u * channels + o_c, mask=(t + u < stop) & m_c, other=0.0)
                rows += (held.to(tl.float32),)
            for u in tl.static_range(BU):
                sums = first
                for k in tl.static_range(K):
                    sums += rows[u + k] * columns[k]
                if SILU:
                    sums *= _sigmoid(sums)
                tl.store(out + here + u * channels + o_c, sums.to(out.dtype.element_ty), mask=(t + u < stop) & m_c)
            window = rows[BU:]
            here += BU * channels
        row = stop


@triton.jit
def _slot(i, row, stop, reads, after, n, arriving, K: tl.constexpr):
    """The slot of row i of a run [row, stop), or of the kernel_size - 1 rows before it or behind it; else of zeros."""
    before = tl.load(reads + row * K + (K - 1) + (i - row), mask=i < row, other=i)
    behind = (i >= stop) & (i < stop + K - 1)
    behind = tl.load(after + (stop - 1) * (K - 1) + (i - stop), mask=behind, other=n + arriving)
    return tl.where(i < stop, before, behind)


@triton.jit
def _inside(x, dout, here, o_c, m_c, channels: tl.constexpr, BU: tl.constexpr):
    """BU rows of x and of dout."""
    rows, grads = (), ()
    for u in tl.static_range(BU):
        rows += (tl.load(x + here + u * channels + o_c, mask=m_c, other=0.0).to(tl.float32),)
        grads += (tl.load(dout + here + u * channels + o_c, mask=m_c, other=0.0).to(tl.float32),)
    return rows, grads


@triton.jit
def _around(
    x, halo, dout, t, row, stop, reads, after, n, arriving, o_c, m_c, channels: tl.constexpr, K: tl.constexpr,
    BU: tl.constexpr,
):  # fmt: skip
    """The same, of which some are before the run [row, stop) or behind it. dout is zero before it."""
    rows, grads = (), ()
    for u in tl.static_range(BU):
        slot = _slot(t + u, row, stop, reads, after, n, arriving, K)
        rows += (_held(x, halo, slot, n, arriving, o_c, m_c, channels),)
        place = dout + slot.to(tl.int64) * channels + o_c
        seen = (slot < n) & (t + u >= row)
        grads += (tl.load(place, mask=seen & m_c, other=0.0).to(tl.float32),)
    return rows, grads


@triton.jit(do_not_specialize=["n", "arriving"])
def backward_kernel(
    x, halo, weight, bias, reads, stops, after, dout, dx, dweight, dbias, n, arriving, by_channel, by_column,
    channels: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, BU: tl.constexpr,
    USE_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """BR rows of BC channels, run by run: the gradients of the rows from their readers on this rank, and the part of
    these rows in those of the weight and of the bias.
    """
    blocks: tl.constexpr = (channels + BC - 1) // BC
    part = tl.program_id(0) // blocks
    row = part * BR
    end = tl.minimum(row + BR, n)
    o_c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    m_c = o_c < channels
    columns = _columns(weight, o_c, m_c, by_channel, by_column, K)
    zero = tl.zeros([BC], dtype=tl.float32)
    first, total, empty, of_columns = zero, zero, (), ()
    if USE_BIAS:
        first = tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    for _ in tl.static_range(K - 1):
        empty += (zero,)
    for _ in tl.static_range(K):
        of_columns += (zero,)
    while row < end:
        stop = tl.minimum(tl.load(stops + row), end)
        window, readers = empty, empty
        here = (row - (K - 1)).to(tl.int64) * channels
        for t in range(row - (K - 1), stop + (K - 1), BU):
            if (t >= row) & (t + BU <= stop):
                found = _inside(x, dout, here, o_c, m_c, channels, BU)
            else:
                found = _around(
                    x, halo, dout, t, row, stop, reads, after, n, arriving, o_c, m_c, channels, K, BU
                )  # fmt: skip
            rows, grads = window + found[0], found[1]
            for u in tl.static_range(BU):
                sums = first
                for k in tl.static_range(K):
                    sums += rows[u + k] * columns[k]
                d = _gradient(grads[u], sums, SILU)
                readers += (d,)
                own = tl.where((t + u >= row) & (t + u < stop), d, 0.0)
                sums = ()
                for k in tl.static_range(K):
                    sums += (of_columns[k] + own * rows[u + k],)
                of_columns = sums
                total += own
            for u in tl.static_range(BU):
                sums = zero
                for k in tl.static_range(K):
                    sums += readers[u + K - 1 - k] * columns[k]
                own = (t + u - (K - 1) >= row) & (t + u - (K - 1) < stop)
                place = dx + here + (u - K + 1) * channels + o_c
                tl.store(place, sums.to(dx.dtype.element_ty), mask=own & m_c)
            window, readers = rows[BU:], readers[BU:]
            here += BU * channels
        row = stop
    for k in tl.static_range(K):
        tl.store(dweight + (part * K + k).to(tl.int64) * channels + o_c, of_columns[k], mask=m_c)
    if USE_BIAS:
        tl.store(dbias + part.to(tl.int64) * channels + o_c, total, mask=m_c)


@triton.jit(do_not_specialize=["n", "arriving"])
def edges_kernel(
    x, halo, weight, bias, reads, read_by, dout, out, n, arriving, by_channel, by_column,
    channels: tl.constexpr, K: tl.constexpr, BC: tl.constexpr, USE_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """One row of BC channels: its gradient from the readers that the table names."""
    blocks: tl.constexpr = (channels + BC - 1) // BC
    row = tl.program_id(0) // blocks
    o_c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    m_c = o_c < channels
    columns = _columns(weight, o_c, m_c, by_channel, by_column, K)
    found = tl.zeros([BC], dtype=tl.float32)
    for k in tl.static_range(K):
        reader = tl.load(read_by + row * K + k)
        if reader < n:
            sums = tl.zeros([BC], dtype=tl.float32)
            if USE_BIAS:
                sums += tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)
            for j in tl.static_range(K):
                slot = tl.load(reads + reader * K + j)
                sums += _held(x, halo, slot, n, arriving, o_c, m_c, channels) * columns[j]
            d = tl.load(dout + reader.to(tl.int64) * channels + o_c, mask=m_c, other=0.0).to(tl.float32)
            found += _gradient(d, sums, SILU) * columns[k]
    tl.store(out + row.to(tl.int64) * channels + o_c, found, mask=m_c)


# ---- launches


FORWARD = 64, 512, 8, 4  # rows and channels of a program, rows that it loads at once, and warps
BACKWARD = 256, 512, 8, 4


def forward(inputs: ConvolutionInputs) -> torch.Tensor:
    """See `ConvolutionKernels`."""
    x, halo, reads, weight, bias, silu = inputs
    (n, channels), (block_rows, block_channels, at_once, warps) = x.shape, FORWARD
    out = torch.empty_like(x)
    if n:
        with torch.cuda.device_of(x):
            forward_kernel[(triton.cdiv(n, block_rows) * triton.cdiv(channels, block_channels),)](
                x, halo, weight, bias, reads.slots, reads.stops, out, n, len(halo), *weight.stride(),
                channels, weight.shape[1], block_rows, block_channels, at_once, bias is not None, silu, num_warps=warps,
            )  # fmt: skip
    return out


def backward(inputs: ConvolutionInputs, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See `ConvolutionKernels`."""
    x, halo, reads, weight, bias, silu = inputs
    (n, channels), (block_rows, block_channels, at_once, warps) = x.shape, BACKWARD
    kernel_size, parts = weight.shape[1], triton.cdiv(n, block_rows)
    dx = torch.empty_like(x)
    dweight = x.new_empty(parts, kernel_size, channels, dtype=torch.float32)
    dbias = None if bias is None else x.new_empty(parts, channels, dtype=torch.float32)
    if n:
        with torch.cuda.device_of(x):
            backward_kernel[(parts * triton.cdiv(channels, block_channels),)](
                x, halo, weight, bias, reads.slots, reads.stops, reads.after, dout, dx, dweight, dbias, n, len(halo),
                *weight.stride(), channels, kernel_size, block_rows, block_channels, at_once, bias is not None, silu,
                num_warps=warps,
            )  # fmt: skip
    of_weight = dweight.sum(0).t().to(weight.dtype, memory_format=torch.contiguous_format)
    return dx, of_weight, None if dbias is None or bias is None else dbias.sum(0).to(bias.dtype)


def edges_backward(inputs: ConvolutionInputs, dout: torch.Tensor, read_by: torch.Tensor) -> torch.Tensor:
    """See `ConvolutionKernels`."""
    x, halo, reads, weight, bias, silu = inputs
    channels, block_channels = x.shape[1], 256
    found = x.new_empty(len(read_by), channels, dtype=torch.float32)
    if len(found):
        with torch.cuda.device_of(x):
            edges_kernel[(len(found) * triton.cdiv(channels, block_channels),)](
                x, halo, weight, bias, reads.slots, read_by, dout, found, len(x), len(halo), *weight.stride(),
                channels, weight.shape[1], block_channels, bias is not None, silu, num_warps=4,
            )  # fmt: skip
    return found
