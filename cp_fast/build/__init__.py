"""Building the native kernels: C++ for the CPU, CUDA for GPUs, by ninja on first use, into a cache of the user.

    recipe    the compilers, what is compiled and how, and the key that all of it gives
    cache     finished builds by key: nothing half-done is ever seen, and only files of this user are used
    builder   both together

The cache is $CP_ATTENTION_CACHE, or else cp-attention in $XDG_CACHE_HOME or ~/.cache. CXX ("g++", "ccache g++"), NVCC
(or CUDA_HOME) and CP_ATTENTION_CUDA_ARCHS ("90", "80;90", "all") choose the compilers and the GPU architectures.
CP_ATTENTION_BUILD_WAIT is how many seconds (600) a process waits for another one's build before it builds itself.
"""
