"""What the scripts are made of: ranks and their clocks, other libraries, compiler switches, cases of kernels."""
