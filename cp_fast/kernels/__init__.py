"""Kernel libraries, a room for each function: in each a protocol, its implementations, and a choice of one."""
