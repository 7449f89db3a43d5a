"""Loops that compiled functions alone call, which get a copy: nothing is made of the loop itself but what is copied.

A compiled function is optimised as a whole, with the copies of all that it calls. By itself numba would also optimise
each of these alone and make machine code of it, since Python could call it: a quarter of the time that compiling takes
at the first start (the entry of 2026-11-29 on the first start in docs/LOG.md).

Such a loop must not print, nor raise an exception with computed arguments: numba would look for these in what it makes
of the loop itself.
"""

import functools
from typing import Any


@functools.cache
def _library() -> Any:
    """Return numba's class of a function's code, without optimisation of the whole and without machine code."""
    from numba.core.codegen import JITCodeLibrary

    class Library(JITCodeLibrary):
        def _optimize_final_module(self) -> None: ...

        def _finalize_final_module(self) -> None:
            self._finalize_dynamic_globals()
            self._verify_declare_only_symbols()
            self._finalized = True

        def serialize_using_object_code(self) -> Any:
            return self.serialize_using_bitcode()

    return Library


def _entry(described: Any, environment: Any, library: Any) -> Any:
    """Return what numba looks a compiled function up by, in its form of what Python calls; it has no machine code.

    described, environment, library: numba's description of the function, its environment and its code.
    """
    from numba import _dynfunc  # pyright: ignore[reportAttributeAccessIssue]

    return _dynfunc.make_function(described.lookup_module(), described.qualname, "", 0, environment, (library,))


@functools.cache
def compiler() -> Any:
    """Return the class of numba's compiler, a `pipeline_class`, for loops that compiled functions alone call."""
    from numba.core.compiler import CompilerBase, DefaultPassBuilder
    from numba.core.compiler_machinery import register_pass
    from numba.core.typed_passes import NativeLowering

    @register_pass(mutates_CFG=True, analysis_only=False)
    class Lowering(NativeLowering):
        _name = "foretoken_lowering"

        def run_pass(self, state: Any) -> Any:
            state.library = _library()(state.targetctx.codegen(), state.func_id.func_qualname)
            state.flags.no_compile = True  # of the function by itself
            super().run_pass(state)
            state.library.finalize()  # which collects what starts the threads of the loops that this one calls
            state.reload_init.extend(state.library._reload_init)
            state.cr = state.cr._replace(cfunc=_entry(state.cr.fndesc, state.cr.env, state.library))
            state.targetctx.insert_user_function(state.cr.cfunc, state.cr.fndesc, [state.library])
            return True

    class Compiler(CompilerBase):
        def define_pipelines(self) -> list[Any]:
            passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
            passes.passes = [(Lowering if made is NativeLowering else made, what) for made, what in passes.passes]
            passes.finalize()
            return [passes]

    return Compiler


@functools.cache
def on_disk() -> Any:
    """Return numba's class that writes a compiled function to disk and reads it, for loops of `compiler`."""
    from llvmlite import binding
    from numba.core.caching import CompileResultCacheImpl
    from numba.core.compiler import compile_result

    class OnDisk(CompileResultCacheImpl):
        def rebuild(self, target_context: Any, payload: Any) -> Any:
            (name, _, code), fndesc, environment, signature, _, lifted, annotation, reload_init, _ = payload
            for again in reload_init:
                again()
            library = _library()(target_context.codegen(), name)
            library._reload_init.update(reload_init)  # for what will be compiled with a copy
            library._final_module = binding.parse_bitcode(code)
            library._finalize_final_module()
            return compile_result(
                typing_context=target_context.typing_context, target_context=target_context, library=library,
                entry_point=_entry(fndesc, environment, library), fndesc=fndesc, environment=environment,
                signature=signature, objectmode=False, lifted=lifted, type_annotation=annotation,
                reload_init=reload_init,
            )  # fmt: skip

    return OnDisk
