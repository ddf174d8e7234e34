"""Building the native kernels: C++ for the CPU, CUDA for GPUs, by ninja on first use, into a cache of the user.

    tools     the compilers, where they are and which
    recipe    what is compiled and how, and the key that all of it gives
    cache     finished builds by key: nothing half-done is ever seen
    locks     one builder at a time, as far as locks work
    trust     whose files are used
    builder   all of them together

The cache is $CP_ATTENTION_CACHE, or else cp-attention in $XDG_CACHE_HOME or ~/.cache. CXX ("g++", "ccache g++"), NVCC
(or CUDA_HOME) and CP_ATTENTION_CUDA_ARCHS ("90", "80;90", "all") choose the compilers and the GPU architectures.
CP_ATTENTION_BUILD_WAIT is how many seconds (600) a process waits for another one's build before it builds itself.
"""

from cp_fast.tools.build.build_errors import BuildError, Unavailable
from cp_fast.tools.build.builder import build, find, library, status, why_not
from cp_fast.tools.build.recipe import DEVICES

__all__ = ["DEVICES", "BuildError", "Unavailable", "build", "find", "library", "status", "why_not"]
