"""The parts that `cp_ref` and `cp_fast` share: groups, contexts, signatures, checks of arguments, scores.

Both import it. It imports torch and, of the two, only `cp_ref.spec`.

    declared          the signature and the docstring of a public function, written once for both packages
    attention_call, plan_arguments, sharding, thd    these stubs, and the checks of arguments that go with them
    context           ContextParallel; what each package adds is data
    groups            torch.distributed as a group; small exchanges of all ranks; errors that name the peer
    scores            the definition of ALiBi, score_mod and dropout
    autocast, derivatives, named_device    PyTorch's autocast, autograd and devices
"""
