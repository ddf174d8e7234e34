"""Memory by address on a GPU, as LLVM instructions, which Numba's Python cannot express.

Kernels get tensors as addresses and strides. So one compiled kernel serves every shape, offsets have 64 bits, and a
thread can load 16 bytes at once, several times before its first store. `memory_sim` has the same functions for the
simulator.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from llvmlite import ir
from numba.core import types

__all__ = [
    "copies",
    "divide",
    "fault",
    "load_int",
    "load_values",
    "store_int",
    "store_values",
]

try:  # Numba-cuda has its own since 0.20.
    from numba.cuda.extending import intrinsic
except ImportError:
    from numba.core.extending import intrinsic


I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
F32, F64 = ir.FloatType(), ir.DoubleType()
WORDS = {1: ir.IntType(8), 2: I16, 4: I32, 8: I64, 16: ir.VectorType(I32, 4)}
WIDE = {"f32": (types.float32, F32), "f64": (types.float64, F64)}
ITEM = {"f16": (I16, 2), "bf16": (I16, 2), "f32": (F32, 4), "f64": (F64, 8)}
GLOBAL = 1  # The address space of device memory.

address = types.int64


def _at(builder: Any, where: Any, kind: Any) -> Any:
    return builder.inttoptr(where, kind.as_pointer(GLOBAL))


@intrinsic
def divide(typingctx: Any, a: Any, b: Any) -> Any:
    """a // b of numbers that are not negative; b is not 0."""
    return types.int64(types.int64, types.int64), lambda context, builder, signature, args: builder.udiv(*args)


@lru_cache
def load_int(size: int) -> Any:
    """load(address) of a signed integer of `size` bytes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(_at(builder, args[0], WORDS[size]), align=size)
        return value if size == 8 else builder.sext(value, I64)

    @intrinsic
    def load(typingctx: Any, where: Any) -> Any:
        return types.int64(address), codegen

    return load


@lru_cache
def store_int(size: int) -> Any:
    """store(address, value) of the lowest `size` bytes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = args[1] if size == 8 else builder.trunc(args[1], WORDS[size])
        builder.store(value, _at(builder, args[0], WORDS[size]), align=size)
        return context.get_dummy_value()

    @intrinsic
    def store(typingctx: Any, where: Any, value: Any) -> Any:
        return types.void(address, types.int64), codegen

    return store


@lru_cache
def copies(size: int) -> tuple[Any, Any]:
    """`copy(to, from)` of one word, and copy4 of four: all loads before the first store, so that four are in flight."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = [builder.load(_at(builder, where, WORDS[size]), align=size) for where in args[1::2]]
        for where, value in zip(args[::2], values, strict=True):
            builder.store(value, _at(builder, where, WORDS[size]), align=size)
        return context.get_dummy_value()

    @intrinsic
    def copy(typingctx: Any, to: Any, source: Any) -> Any:
        return types.void(address, address), codegen

    @intrinsic
    def copy4(typingctx: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
        return types.void(*[address] * 8), codegen

    return copy, copy4


def _assembly(builder: Any, result: Any, argument: Any, text: str, constraint: str, value: Any) -> Any:
    kind = ir.FunctionType(result, [argument])
    return builder.call(ir.InlineAsm(kind, f"{text} $0, $1;", constraint, side_effect=False), [value])


def _widened(builder: Any, value: Any, dtype: str, wide: str) -> Any:
    if dtype == "f16":
        value = _assembly(builder, F32, I16, "cvt.f32.f16", "=f,h", value)
    elif dtype == "bf16":
        value = builder.bitcast(builder.shl(builder.zext(value, I32), ir.Constant(I32, 16)), F32)
    return builder.fpext(value, F64) if wide == "f64" and dtype != "f64" else value


def _rounded(builder: Any, value: Any, wide: str, dtype: str) -> Any:
    """To the nearest, ties to even; once."""
    if dtype in ("f32", "f64"):
        return value if dtype == wide else builder.fptrunc(value, F32) if dtype == "f32" else builder.fpext(value, F64)
    if dtype == "f16":
        kind, letter = (F32, "f") if wide == "f32" else (F64, "d")
        return _assembly(builder, I16, kind, f"cvt.rn.f16.{wide}", f"=h,{letter}", value)
    if wide == "f64":  # To float32 with the last bit set if bits were cut off, so that the next rounding sees it.
        short = _assembly(builder, F32, F64, "cvt.rz.f32.f64", "=f,d", value)
        inexact = builder.fcmp_unordered("!=", builder.fpext(short, F64), value)
        value = builder.bitcast(builder.or_(builder.bitcast(short, I32), builder.zext(inexact, I32)), F32)
    return _assembly(builder, I16, F32, "cvt.rn.bf16.f32", "=h,f", value)


@lru_cache
def load_values(dtype: str, wide: str, width: int) -> Any:
    """load(address) of 4 numbers, or of 1 and three zeros, as a tuple of `wide`."""
    item, size = ITEM[dtype]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if width == 1:
            values = [builder.load(_at(builder, args[0], item), align=size)]
        else:
            count = min(4, 16 // size)
            vector = ir.VectorType(item, count)
            values = []
            for part in range(0, 4, count):
                where = builder.add(args[0], ir.Constant(I64, part * size))
                loaded = builder.load(_at(builder, where, vector), align=count * size)
                values += [builder.extract_element(loaded, ir.Constant(I32, i)) for i in range(count)]
        found = [_widened(builder, value, dtype, wide) for value in values]
        found += [ir.Constant(WIDE[wide][1], 0.0)] * (4 - width)
        return context.make_tuple(builder, signature.return_type, found)

    @intrinsic
    def load(typingctx: Any, where: Any) -> Any:
        return types.UniTuple(WIDE[wide][0], 4)(address), codegen

    return load


@lru_cache
def store_values(dtype: str, wide: str, width: int) -> Any:
    """store(address, a, b, c, d) of 4 numbers, or of the first."""
    item, size = ITEM[dtype]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = [_rounded(builder, value, wide, dtype) for value in args[1 : 1 + width]]
        count = 1 if width == 1 else min(4, 16 // size)
        vector = ir.VectorType(item, count)
        for part in range(0, width, count):
            where = builder.add(args[0], ir.Constant(I64, part * size))
            if count == 1:
                builder.store(values[0], _at(builder, where, item), align=size)
                continue
            packed = ir.Constant(vector, ir.Undefined)
            for i in range(count):
                packed = builder.insert_element(packed, values[part + i], ir.Constant(I32, i))
            builder.store(packed, _at(builder, where, vector), align=count * size)
        return context.get_dummy_value()

    @intrinsic
    def store(typingctx: Any, where: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        return types.void(address, *[WIDE[wide][0]] * 4), codegen

    return store


@lru_cache
def fault(text: str) -> Any:
    """fail(): a device-side assertion with this text, like C's assert; PyTorch's next call that waits raises."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        message = context.insert_string_const_addrspace(builder, text)
        pointer = message.type
        kind = ir.FunctionType(ir.VoidType(), [pointer, pointer, I32, pointer, I64])
        function = builder.module.globals.get("__assertfail") or ir.Function(builder.module, kind, "__assertfail")
        builder.call(function, [message, message, ir.Constant(I32, 0), message, ir.Constant(I64, 1)])
        return context.get_dummy_value()

    @intrinsic
    def fail(typingctx: Any) -> Any:
        return types.void(), codegen

    return fail
