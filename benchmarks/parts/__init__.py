"""Parts of the scripts: ranks and their clocks, other libraries, compiler switches, cases of kernels."""
