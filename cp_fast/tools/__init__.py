"""Tools around attention: the build of native kernels, the command line, and the cost model."""
