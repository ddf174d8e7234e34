"""What `cp_ref` and `cp_fast` have in common and is not arithmetic: groups, contexts, signatures, checks of arguments.

Both import it; it imports `cp_ref.spec`, torch and nothing else of the two.

    declared          the public functions' signatures and docstrings, declared once and implemented twice
    attention, plans, slices, thd    these declarations, and the checks of arguments that go with them
    context           ContextParallel; what each package adds is data
    processes         torch.distributed as a group; errors that name the peer
    collectives       what every rank gets from every other
    casting, derivatives, devices    what PyTorch's autocast, autograd and devices mean here
"""
