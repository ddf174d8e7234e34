"""The parts that `cp_ref` and `cp_fast` share, without arithmetic: groups, contexts, signatures, checks of arguments.

Both import it. It imports torch and, of the two, only `cp_ref.spec`.

    declared          the public functions' signatures and docstrings, declared once and implemented twice
    attention, plans, slices, thd    these declarations, and the checks of arguments that go with them
    context           ContextParallel; what each package adds is data
    processes         torch.distributed as a group; errors that name the peer
    collectives       small exchanges of all ranks with all others
    casting, derivatives, devices    PyTorch's autocast, autograd and devices
"""
