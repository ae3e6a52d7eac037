"""Lets vLLM's Model Runner V2 run on a machine without a GPU, its Triton kernels interpreted.

Python imports a `sitecustomize` found on PYTHONPATH at start; scripts/v2_on_cpu.sh and the tests put this folder there
for the processes that run V2, together with TRITON_INTERPRET=1 and VLLM_USE_V2_MODEL_RUNNER=1. Three things
are missing for a CPU: an active Triton driver, boolean masks (interpreted `mask & scalar` becomes
int8), and libdevice's log1p (a stub without a GPU). Kernels run in `numpy_interpreter`, or in Triton's own interpreter
with MTPC_INTERPRETER=triton.
"""

import os


def _activate_driver() -> None:
    from triton.backends import Backend, backends

    nvidia = backends["nvidia"]

    class CpuDriver(nvidia.driver):
        @staticmethod
        def is_active() -> bool:
            return True

    backends["cpu"] = Backend(compiler=nvidia.compiler, driver=CpuDriver)


def _boolean_masks() -> None:
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def boolean(mask):
        if mask is None or mask.data.dtype == np.bool_:
            return mask
        return TensorHandle(mask.data.astype(np.bool_), mask.dtype)

    store, load = InterpreterBuilder.create_masked_store, InterpreterBuilder.create_masked_load
    InterpreterBuilder.create_masked_store = lambda self, ptr, value, mask, *rest: store(
        self, ptr, value, boolean(mask), *rest
    )
    InterpreterBuilder.create_masked_load = lambda self, ptr, mask, *rest: load(self, ptr, boolean(mask), *rest)


def _log1p() -> None:
    import triton.language as tl
    from triton.language.extra import libdevice

    libdevice.log1p = lambda x, _semantic=None: tl.log(1.0 + x)


def _patch_the_language_once() -> None:
    """Patch Triton's language once: Triton does so for every device function called, which is slow."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_lang(fn):
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if languages and not any(tl.core.is_builtin(language.load) for language in languages):
            return interpreter._LangPatchScope()
        return patch(fn)

    interpreter._patch_lang = patch_lang


def _numpy_interpreter() -> None:
    import numpy_interpreter

    numpy_interpreter.install()


def _no_topk_topp_kernel() -> None:
    """vLLM's top-k/top-p kernel does not run in the interpreter; its own PyTorch version does the same."""
    from vllm_mtpc.proposers.patches.patch import when_imported

    def switch_off() -> None:
        import vllm.v1.sample.ops.topk_topp_sampler as module

        module.HAS_TRITON = False

    when_imported("vllm.v1.sample.ops.topk_topp_sampler", switch_off)


def _async_scheduling_on_cpu() -> None:
    """vLLM's CPU platform switches asynchronous scheduling off; the GPU default is on, and to be tested."""
    from vllm_mtpc.proposers.patches.patch import when_imported

    def keep() -> None:
        from vllm.platforms.cpu import CpuPlatform

        check = CpuPlatform.check_and_update_config.__func__

        def check_and_update_config(cls, vllm_config):
            asked = vllm_config.scheduler_config.async_scheduling
            check(cls, vllm_config)
            vllm_config.scheduler_config.async_scheduling = asked

        CpuPlatform.check_and_update_config = classmethod(check_and_update_config)

    when_imported("vllm.platforms.cpu", keep)


if os.environ.get("TRITON_INTERPRET") == "1":
    _activate_driver()
    _boolean_masks()
    _log1p()
    _patch_the_language_once()
    _no_topk_topp_kernel()
    _numpy_interpreter()
if os.environ.get("MTPC_TEST_ASYNC") == "1":
    _async_scheduling_on_cpu()
