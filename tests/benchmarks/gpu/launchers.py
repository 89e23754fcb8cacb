"""The C functions with which Triton launches kernels, compiled before any timed process needs one.

Triton 3.6 compiles one with gcc for every signature, which takes half a second; later versions have one for all.
"""

from functools import cache
from typing import Any


@cache
def can_link() -> bool:
    """Whether libcuda is here, which launchers are linked with."""
    from triton.backends.nvidia import driver

    try:
        driver.library_dirs()
    except AssertionError:
        # That is how Triton says that it finds none.
        return False
    return True


@cache
def compile_driver() -> None:
    """Compile what every process that launches needs. Needs no device."""
    from triton.backends.nvidia.driver import CudaUtils

    CudaUtils()


def compile_launcher(binary: Any) -> None:
    """Compile the function for a kernel's signature into Triton's cache, as a launch would; without libcuda, nothing."""
    from triton.backends.nvidia import driver

    if not can_link():
        return
    compile_driver()
    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(binary.src, binary.metadata)
