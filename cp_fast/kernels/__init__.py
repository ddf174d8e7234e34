"""Kernel libraries, a room for each function: in each a protocol, its implementations, and a choice of one.

`this_gpu` says for all of them what this machine's GPU can run.
"""
