"""How a case of attention is played on ranks and judged: references, budgets, and the checks of the tiers.

reference    the oracle and the simulated group: the one module that imports `cp_ref`
baselines    plain PyTorch and a rounded reference, whose errors are the units of budgets
budgets      tensors against exact ones
play         forward and backward on every rank
values       tiers logic, budget, pairs
calls        tiers plan, spellings, determinism
hygiene, probes, metamorphic        tiers of these names
"""
