"""How the CPU kernels are compiled, in one place, and kept as object files between starts.

Importing Numba takes longer than loading everything that it has compiled. So its decorators are applied when a function
is first compiled, and a start that finds all of its code on disk does not import it: LLVM links the objects.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import hashlib
import importlib.metadata
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from llvmlite import binding, ir

from headway.kernels.cpu.code import ENDING, exclusive, keep, place_of, read, sources

_ENTRY = "headway_entry"
# Versions of Numba of which the parts that are used below are known, as in pyproject.toml: from the first to before the
# second.
NUMBA = "0.66", "0.69"
# A function of more instructions is called: a call costs nothing then, and one large function takes LLVM twice as long.
_MOST_INLINED = 200
_loaded: list[Any] = []  # the code lives as long as what has linked it
names: dict[int, str] = {}  # of what was linked, by address
_named: contextvars.ContextVar[list[Path] | None] = contextvars.ContextVar("named", default=None)
# A function that takes the name of a function before it is compiled, or waited for, and the path of its code.
listener: Callable[[str, Path], None] | None = None


class _LazyFunction:
    """A function that Numba compiles when it is first needed."""

    def __init__(self, make: Callable[[], Any], function: Callable[..., Any] | None = None) -> None:
        self._make, self.__wrapped__ = make, function

    @functools.cached_property
    def _made(self) -> Any:
        return self._make()

    @functools.cached_property
    def _numba_type_(self) -> Any:
        """The attribute by which Numba finds the type of a global of a function that it compiles."""
        from numba.core.registry import cpu_target

        made, context = self._made, cpu_target.typing_context
        context.refresh()
        return context.resolve_value_type(made)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)

    def __call__(self, *arguments: Any) -> Any:
        return self._made(*arguments)


class _Types:
    """Numba's types, by their names."""

    def __getattr__(self, name: str) -> Any:
        from numba import types

        return getattr(types, name)


types: Any = _Types()
# The annotations of functions that are `emitted`.
Kind: TypeAlias = Any
Number: TypeAlias = Any
boolean: TypeAlias = Any
float32: TypeAlias = Any
float64: TypeAlias = Any
int32: TypeAlias = Any
int64: TypeAlias = Any


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile with Numba for callers that are compiled too, dividing as C does."""
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "error_model": "numpy", **options}

    def make(function: Callable[..., Any]) -> Any:
        from numba import njit

        made = njit(pipeline_class=_passes(), **options)(function)
        compile_for = made.compile
        # A number that stands in a call is no type of its own: the function would be compiled once for each.
        made.compile = lambda kinds: compile_for(tuple(types.unliteral(kind) for kind in kinds))
        return made

    return lambda function: _LazyFunction(lambda: make(function), function)


def emitted(function: Callable[..., Any]) -> Any:
    """An operation for compiled functions, as LLVM IR that `function(builder, *arguments)` writes.

    Its annotations are the types of Numba: arguments are LLVM's values of these, and so is what it returns. But a Kind
    is a type of Numba itself, and a Number that stands in the code is an int.
    """
    _, *names, result = function.__annotations__.values()

    def type_of(name: str) -> Any:
        return getattr(types, {"Number": "int64", "None": "void"}.get(name, name))

    @functools.wraps(function)
    def typed(typing: Any, *given: Any) -> Any:
        known, kinds = [], []
        for name, kind in zip(names, given, strict=True):
            is_number = name == "Number" and isinstance(kind, types.IntegerLiteral)
            known.append(kind.literal_value if is_number else kind if name == "Kind" else None)
            kinds.append(type_of(name) if known[-1] is None else kind)

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            arguments = (value if each is None else each for each, value in zip(known, values, strict=True))
            made = function(builder, *arguments)
            return context.get_dummy_value() if made is None else made

        return type_of(result)(*kinds), generate

    def make() -> Any:
        from numba.extending import intrinsic

        return intrinsic(prefer_literal="Number" in names)(typed)

    return _LazyFunction(make)


def external(name: str, result: str, *arguments: str) -> Any:
    """A function of C, with the names of Numba's types."""
    return _LazyFunction(
        lambda: types.ExternalFunction(name, getattr(types, result)(*(getattr(types, each) for each in arguments)))
    )


@functools.lru_cache(maxsize=1)
def target() -> tuple[str, str, str]:
    """The target of compiled code, by LLVM's names.

    Returns:
        Architecture-vendor-system, the processor, and "+" or "-" its extensions, as NUMBA_CPU_NAME and
        NUMBA_CPU_FEATURES say, or else this machine's.
    """
    name, features = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    host = binding.get_host_cpu_features().flatten() if features is None else features
    return binding.get_process_triple(), binding.get_host_cpu_name() if name is None else name, host


def address_of(function: Callable[..., None]) -> int:
    """The address of the machine code of a function of int64s that returns nothing.

    It is loaded, or compiled and kept. Processes that start together compile each function once, in the first that
    needs it. A function is known by its name and by what it refers to from outside, which are numbers.
    """
    function = inspect.unwrap(function)
    path, named = _path_of(function), _named.get()
    if named is not None:
        named.append(path)
        return 0
    code = read(path.name)
    name = function.__qualname__.partition(".")[0].removesuffix("_job").lstrip("_")
    if code is None:
        if listener is not None:
            listener(name, path)
        with exclusive(path.with_suffix(".lock")):
            code = read(path.name)
            if code is None:
                code = compile_entry(function)
                keep(path.name, code)
    address = _link(code)
    names[address] = name
    return address


def path_of(make: Callable[[], int]) -> Path:
    """Where the code is kept, or will be, of which `make` returns the address."""
    paths: list[Path] = []
    token = _named.set(paths)
    try:
        make()
    finally:
        _named.reset(token)
    return paths[0]


@functools.cache
def callable_of(function: Callable[..., None]) -> Callable[..., None]:
    """The same for callers in Python; it runs without the interpreter lock."""
    count = inspect.unwrap(function).__code__.co_argcount
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * count)(address_of(function))


def _path_of(function: Callable[..., None]) -> Path:
    code, outside = function.__code__, [cell.cell_contents for cell in function.__closure__ or ()]
    own = code.co_code, code.co_names, [each for each in code.co_consts if not hasattr(each, "co_code")]
    known = [(name, type(value).__name__, value) for name, value in zip(code.co_freevars, outside, strict=True)]
    digest = hashlib.sha256(repr((sources(), target(), own, known)).encode()).hexdigest()[:16]
    name = f"{function.__module__.removeprefix('headway.kernels.')}.{function.__qualname__.partition('.<locals>')[0]}"
    return place_of(f"{name}-{digest}{ENDING}")


@functools.lru_cache(maxsize=1)
def _machine() -> Any:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    return binding.Target.from_triple(target()[0]).create_target_machine(jit=True)


def _link(code: bytes) -> int:
    """Link an object file and return the address of its entry.

    Each object has its own engine, because functions of several objects can have one name.
    """
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _loaded.append(engine)
    return int(engine.get_function_address(_ENTRY))


@functools.lru_cache(maxsize=1)
def _passes() -> Any:
    """Numba's compiler with the passes that functions of numbers, without closures or exceptions, have need of."""
    from numba.core import typed_passes, untyped_passes
    from numba.core.compiler import CompilerBase
    from numba.core.compiler_machinery import PassManager

    class Passes(CompilerBase):  # type: ignore[misc]
        def define_pipelines(self) -> list[Any]:
            self.state.type_annotation = None
            passes = PassManager("headway")
            for each in (
                untyped_passes.TranslateByteCode,
                untyped_passes.FixupArgs,
                untyped_passes.IRProcessing,
                untyped_passes.RewriteSemanticConstants,
                untyped_passes.GenericRewrites,
                untyped_passes.InlineInlinables,
                untyped_passes.DeadBranchPrune,
                untyped_passes.ReconstructSSA,
                typed_passes.NopythonTypeInference,
                typed_passes.PreLowerStripPhis,
                typed_passes.IRLegalization,
                typed_passes.NativeLowering,
                typed_passes.NoPythonBackend,
            ):
                passes.add_pass(each, each.__name__)
            passes.finalize()
            return [passes]

    return Passes


@functools.lru_cache(maxsize=1)
def _codegen() -> Any:
    """Numba's, but each function is optimised once, together with all that an entry needs, and none is loaded.

    Numba optimises a function alone, and again within each that calls it, and makes machine code of every result.
    """
    from numba.core.codegen import CPUCodeLibrary, JITCPUCodegen

    class Library(CPUCodeLibrary):  # type: ignore[misc]
        optimize = CPUCodeLibrary._optimize_final_module

        def _optimize_final_module(self) -> None:
            pass

        def _finalize_final_module(self) -> None:
            self._finalized = True

        def get_pointer_to_function(self, name: str) -> int:
            return 0

    class Codegen(JITCPUCodegen):  # type: ignore[misc]
        _library_class = Library

        def set_env(self, env_name: str, env: Any) -> None:
            pass

    return Codegen("headway")


def compile_entry(function: Callable[..., None], see: Callable[[str], None] = lambda code: None) -> bytes:
    """An object file with the function as _ENTRY, which calls its own copies of the functions that it uses.

    Copies can differ in the order of sums, as each is optimised for its callers. All have one name, and of a name LLVM
    takes the code that it met first: results would depend on what the process has compiled or loaded before.

    Args:
        see: is given LLVM's code.

    Raises:
        ValueError: this Numba is not one of NUMBA and cannot do it, or does not work with what is installed beside it.
    """
    version, (first, end) = importlib.metadata.version("numba"), NUMBA
    least, present, limit = (tuple(map(int, each.split(".")[:2])) for each in (first, version, end))
    try:
        if present < least:
            raise ImportError("it is too old")  # LLVM would end the process
        return _compile_entry(function, see)
    except Exception as error:
        if present < limit and not isinstance(error, ImportError):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"numba {version} cannot compile the CPU kernels ({type(error).__name__}: {reason}); install one that can: "
            f"pip install 'numba>={first},<{end}'"
        ) from error


def _compile_entry(function: Callable[..., None], see: Callable[[str], None]) -> bytes:
    from numba.core.ccallback import _CFuncCompiler  # type: ignore[attr-defined]
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    class Plain(_CFuncCompiler):  # type: ignore[misc]
        def _customize_flags(self, flags: Any) -> Any:
            flags = super()._customize_flags(flags)
            flags.no_cfunc_wrapper = True  # which would show errors by what only Numba has
            return flags

    context = cpu_target.target_context
    with global_compiler_lock:
        codegen, context._internal_codegen = context._internal_codegen, _codegen()
        try:
            options = {"nopython": True, "error_model": "numpy"}
            compiler = Plain(function, cpu_target, options, {}, pipeline_class=_passes())
            result = compiler.compile((types.int64,) * function.__code__.co_argcount, types.void)
        finally:
            context._internal_codegen = codegen
        library = result.library
        library.add_ir_module(_entry_of(result.target_context, result.fndesc))
        library.finalize()
        module = library._final_module
        for each in module.functions:
            if not each.is_declaration and each.name != _ENTRY:
                each.linkage = binding.Linkage.internal
                if sum(1 for block in each.blocks for _ in block.instructions) > _MOST_INLINED:
                    each.add_function_attribute("noinline")
        library.optimize()
        see(str(module))
        return bytes(_codegen()._tm.emit_object(module))


def _entry_of(context: Any, described: Any) -> Any:
    """A module with a function of the same numbers, which calls the function as Numba's functions are called."""
    module = context.create_module(_ENTRY)
    kind = context.call_conv.get_function_type(described.restype, described.argtypes)
    callee = ir.Function(module, kind, described.llvm_func_name)
    entry = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * len(described.argtypes)), _ENTRY)
    builder = ir.IRBuilder(entry.append_basic_block())
    context.call_conv.call_function(builder, callee, described.restype, described.argtypes, entry.args)
    builder.ret_void()
    return module


_aligned_alloc = external("aligned_alloc", "int64", "int64", "int64")
_free = external("free", "void", "int64")


@compiled()
def take_memory(size: int) -> int:
    """The address of so many bytes, on a cache line of their own; to be given back.

    Numba ends the life of an array after its last use, and does not count the use of its address.
    """
    return _aligned_alloc(64, (size + 63) // 64 * 64)  # type: ignore[no-any-return]


@compiled()
def give_back(address: int) -> None:
    _free(address)
