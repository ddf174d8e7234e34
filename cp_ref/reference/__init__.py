"""The arithmetic, in plain PyTorch: the oracle, the simulated group, and the reference of attention and every layer.

`cp_fast` may not import this room: so that two implementations are compared, and not one with itself.
"""
