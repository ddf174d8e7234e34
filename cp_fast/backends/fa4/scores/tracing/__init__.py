"""From a function of scores, written in PyTorch, to expressions.

- trace_scores         PyTorch writes down the operators of the function and of its derivative
- aten_operations      each element-wise operator becomes nodes of an expression
- composed_operations  operators that become several nodes
- operator_kinds       in which kind an operator computes: where a value is rounded
- traced_values        the values so far: leaves, numbers, captured tensors
"""
