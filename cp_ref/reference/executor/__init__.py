"""The reference's executor: it plays a schedule in plain PyTorch."""
