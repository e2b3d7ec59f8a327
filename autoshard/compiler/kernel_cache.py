"""XLA:GPU's file of compiled kernels."""

from autoshard.compiler.versions import jax_version


def kernel_cache_options(path: str) -> dict[str, str | bool]:
    """Compiler options by which XLA:GPU takes kernels that it has compiled before from a file, and adds those that it
    has not (openxla/xla 13569, 13781; JAX sets them by `jax_persistent_cache_enable_xla_caches`).

    Kernels are known by what they compute, not by the device that they are compiled for. The file is read and written
    in place: one process, and one program at a time. The program is the same; most of a compilation goes into code for
    kernels and its assembly. Before JAX 0.11 kernels must also be compiled apart from each other for that; later ones
    set the file alone, and XLA no longer knows the other option (tried with 0.12).
    """
    file: dict[str, str | bool] = {"xla_gpu_kernel_cache_file": path}
    return file if jax_version() >= (0, 11) else {**file, "xla_gpu_enable_llvm_module_compilation_parallelism": True}
