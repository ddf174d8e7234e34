"""Linear attention and causal convolutions in plain PyTorch: the oracle, and the schedules of
`cp_ref.schedules.linear_schedules`, played.
"""
