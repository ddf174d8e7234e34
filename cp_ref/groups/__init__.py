"""Ranks that exchange messages, agree before the first one, and share the work.

group            `Group`: what a schedule needs of ranks. It knows no tensor.
process_groups   torch.distributed's groups as such groups
context          `ContextParallel`: the object that every call takes
agreement        all ranks raise, or none; and have the same, or a value made of what all have
collectives      sums and gathers, spelled out as exchanges
"""
