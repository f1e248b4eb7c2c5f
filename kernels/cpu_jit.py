"""Kernels for one processor family, compiled when first used: AVX512 with bfloat16 dot products, on Linux.

llvmlite brings LLVM as a library, so no compiler has to be on the machine. `Emitter` writes one function of LLVM's
language; `compile_kernel` wraps a body so that every thread of a team runs it, compiles, and gives a Python callable:

    callable(arguments) -> entry -> GOMP_parallel -> body(arguments, thread, team) in each thread

The team is that of the OpenMP runtime which torch uses in this process: a second set of threads would fight the first for
the cores. Knows nothing of what is computed.

Invariants: where the processor, llvmlite or the OpenMP runtime does not fit, or `TIEREDKV_CPU_JIT=0`, `is_available` is
False and nothing here is called. A kernel gets addresses: whoever calls it answers for shapes, types and lifetimes.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

try:
    from llvmlite import binding, ir
except ImportError:
    ir = None

logger = logging.getLogger(__name__)

SWITCH = "TIEREDKV_CPU_JIT"
# Numbers in one register: float32, and bfloat16 in pairs.
LANES = 16
_FEATURES = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512bf16")
_OPENMP = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
# Values of LLVM's language, which has no types that Python could check.
Value: TypeAlias = Any

if ir is not None:

    class _BFloat(ir.Type):  # type: ignore[misc]
        """bfloat16, which llvmlite's own list of types lacks."""

        def _to_string(self) -> str:
            return "bfloat"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, _BFloat)

        def __hash__(self) -> int:
            return hash(_BFloat)

    I32, I64, F32, F64 = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()
    PTR, VOID = ir.PointerType(), ir.VoidType()
    FLOATS = ir.VectorType(F32, LANES)
    INTS = ir.VectorType(I32, LANES)
    HALVES = ir.VectorType(_BFloat(), LANES)
    PAIRS = ir.VectorType(_BFloat(), 2 * LANES)
    SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)


def constant(kind: Value, value: float | Sequence[float]) -> Value:
    return ir.Constant(kind, value)


def i64(value: int) -> Value:
    return ir.Constant(I64, value)


def floats(value: float) -> Value:
    """A register of one number, 16 times."""
    return ir.Constant(FLOATS, [value] * LANES)


def new_module(name: str) -> Value:
    return ir.Module(name)


class Emitter:
    """One function being written. Offsets are bytes; `b` is llvmlite's builder."""

    def __init__(self, module: Value, name: str, arguments: Sequence[Value]) -> None:
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(VOID, arguments), name)
        self.arguments = self.function.args
        self.b = ir.IRBuilder(self.function.append_basic_block())

    def at(self, pointer: Value, offset: Value) -> Value:
        return self.b.gep(pointer, [offset], source_etype=ir.IntType(8))

    def add(self, *terms: Value) -> Value:
        return functools.reduce(self.b.add, terms)

    def mul(self, *factors: Value) -> Value:
        return functools.reduce(self.b.mul, factors)

    def least(self, first: Value, second: Value) -> Value:
        return self.b.select(self.b.icmp_signed("<", first, second), first, second)

    def stack(self, num_registers: int) -> Value:
        """Memory of this call, aligned to a register."""
        memory = self.b.alloca(FLOATS, num_registers)
        memory.align = 64
        memory.type = PTR
        return memory

    def load(self, kind: Value, pointer: Value, align: int = 2) -> Value:
        return self.b.load(pointer, typ=kind, align=align)

    def store(self, value: Value, pointer: Value, align: int = 2) -> None:
        self.b.store(value, pointer, align=align)

    def load_floats(self, pointer: Value) -> Value:
        """16 numbers of bfloat16 as float32."""
        return self.b.fpext(self.load(HALVES, pointer), FLOATS)

    def store_halves(self, value: Value, pointer: Value) -> None:
        """16 numbers of float32, rounded to bfloat16."""
        self.store(self.b.fptrunc(value, HALVES), pointer)

    def call(self, name: str, result: Value, *arguments: Value, fastmath: Sequence[str] = ()) -> Value:
        """Call a function known by name: an intrinsic or one of the OpenMP runtime."""
        callee = self.module.globals.get(name)
        if callee is None:
            callee = ir.Function(self.module, ir.FunctionType(result, [a.type for a in arguments]), name)
        return self.b.call(callee, arguments, fastmath=fastmath)

    def greater(self, first: Value, second: Value) -> Value:
        """The greater one, number by number; `second` where one of them is not a number."""
        return self.b.select(self.b.fcmp_ordered(">", first, second), first, second)

    def prefetch(self, pointer: Value, level: int = 1) -> None:
        """Ask memory for a line, into the cache of `level` 1 or 2. Far more requests can be under way to the second."""
        self.call("llvm.prefetch.p0", VOID, pointer, *(ir.Constant(I32, flag) for flag in (0, 4 - level, 1)))

    def splat(self, value: Value, kind: Value) -> Value:
        """A register of `value`, a scalar of its element type."""
        none = ir.Constant(kind, ir.Undefined)
        lanes = ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count)
        return self.b.shuffle_vector(self.b.insert_element(none, value, ir.Constant(I32, 0)), none, lanes)

    def load_pair(self, pointer: Value) -> Value:
        """Two neighbouring numbers of bfloat16, 16 times."""
        return self.b.bitcast(self.splat(self.load(I32, pointer), INTS), PAIRS)

    def dot(self, total: Value, first: Value, second: Value) -> Value:
        """total [16] + the sums of two products each of first [32] and second [32]."""
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, first, second)

    def shuffle(self, first: Value, second: Value, lanes: Sequence[int]) -> Value:
        return self.b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))

    def sum(self, value: Value) -> Value:
        start = ir.Constant(F32, 0.0)
        return self.call("llvm.vector.reduce.fadd.v16f32", F32, start, value, fastmath=("reassoc",))

    def largest(self, value: Value) -> Value:
        return self.call("llvm.vector.reduce.fmax.v16f32", F32, value, fastmath=("nnan",))

    def exp(self, value: Value) -> Value:
        """e^value to 3e-6 of itself, for numbers down to -1e38: 2^rest by its series, times 2^whole by the exponent."""
        power = self.b.fmul(value, floats(1.4426950408889634))
        whole = self.call("llvm.rint.v16f32", FLOATS, power)
        rest = self.b.fsub(power, whole)
        series = floats(0.0013333558)
        for factor in (0.0096181291, 0.0555041087, 0.2402265070, 0.6931471806, 1.0):
            series = self.call("llvm.fma.v16f32", FLOATS, series, rest, floats(factor))
        all_lanes, as_set = ir.Constant(ir.IntType(LANES), -1), ir.Constant(I32, 4)
        scale = "llvm.x86.avx512.mask.scalef.ps.512"
        return self.call(scale, FLOATS, series, whole, series, all_lanes, as_set)

    def loop(
        self,
        low: Value,
        high: Value,
        step: int,
        body: Callable[[Value, list[Value]], Sequence[Value] | None],
        carried: Sequence[Value] = (),
    ) -> list[Value]:
        """`for i in range(low, high, step): carried = body(i, carried)`; returns what was carried out."""
        b, before = self.b, self.b.block
        head, inside, after = (b.append_basic_block() for _ in range(3))
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(I64)
        values = [b.phi(value.type) for value in carried]
        b.cbranch(b.icmp_signed("<", index, high), inside, after)
        b.position_at_end(inside)
        new = body(index, values) or []
        following = b.add(index, i64(step))
        for phi, first, later in zip([index, *values], [low, *carried], [following, *new], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, b.block)
        b.branch(head)
        b.position_at_end(after)
        return values

    def share(self, count: Value, thread: Value, team: Value) -> tuple[Value, Value]:
        """Which of `count` items are this thread's: a run, lengths differing by one at most."""
        low = self.b.sdiv(self.mul(count, thread), team)
        return low, self.b.sdiv(self.mul(count, self.add(thread, i64(1))), team)


@functools.cache
def is_available() -> bool:
    """Whether kernels can be compiled and run in this process."""
    if ir is None or os.environ.get(SWITCH) == "0" or platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    found = binding.get_host_cpu_features()
    if not all(found.get(feature) for feature in _FEATURES):
        return False
    try:
        process = ctypes.CDLL(None)
        for name in _OPENMP:
            binding.add_symbol(name, ctypes.cast(getattr(process, name), ctypes.c_void_p).value)
    except (AttributeError, OSError) as error:
        logger.info("no kernels of our own on this CPU: %s", error)
        return False
    return True


def works(what: str, check: Callable[[], object]) -> bool:
    """Whether kernels can be had here and `check`, which compiles one of them, neither raises nor is False. `what` it is for
    goes into the warning where it raises.
    """
    if not is_available():
        return False
    try:
        return check() is not False
    except Exception as error:
        # Another LLVM, another libffi: whatever is in the way, the path through torch serves.
        logger.warning("no %s of our own on this CPU: %s", what, error)
        return False


def compile_kernel(
    name: str, kinds: Sequence[Value], write: Callable[[Emitter, list[Value], Value, Value], None]
) -> Callable[..., None]:
    """A kernel as a Python callable that takes addresses and numbers of `kinds` (I64 or F64).

    `write(emitter, arguments, thread, team)` writes the body that each thread runs. Raises `RuntimeError` when LLVM
    refuses the result.
    """
    module = new_module(name)
    body = Emitter(module, "body", [PTR])
    arguments = [body.load(kind, body.at(body.arguments[0], i64(8 * at)), 8) for at, kind in enumerate(kinds)]
    thread, team = (body.b.sext(body.call(call, I32), I64) for call in ("omp_get_thread_num", "omp_get_num_threads"))
    write(body, arguments, thread, team)
    body.b.ret_void()
    entry = Emitter(module, "entry", [I64, *kinds])
    packed = entry.stack(-(-len(kinds) // 8))
    for at, argument in enumerate(entry.arguments[1:]):
        entry.store(argument, entry.at(packed, i64(8 * at)), 8)
    address = ir.FormattedConstant(PTR, "@body")
    entry.call("GOMP_parallel", VOID, address, packed, entry.b.trunc(entry.arguments[0], I32), ir.Constant(I32, 0))
    entry.b.ret_void()
    address = _compile(module).get_function_address("entry")
    types = [ctypes.c_double if kind == F64 else ctypes.c_int64 for kind in kinds]
    call = ctypes.CFUNCTYPE(None, ctypes.c_int64, *types)(address)
    return lambda *values: call(torch.get_num_threads(), *values)


def compile_shared(module: Value, names: Sequence[str]) -> None:
    """Compile functions that bodies of kernels call by name, once for all kernels."""
    engine = _compile(module)
    for name in names:
        binding.add_symbol(name, engine.get_function_address(name))


# Compiled code lives as long as its engine.
_engines: list[Any] = []


def _compile(module: Value) -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=2
    )
    parsed = binding.parse_assembly(str(module))
    # The passes that usually come before code is made would take 0.25 s more and gain nothing.
    parsed.verify()
    engine = binding.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    _engines.append(engine)
    return engine
