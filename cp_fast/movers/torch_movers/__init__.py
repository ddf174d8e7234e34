"""The movers by PyTorch's operators: any device, no compiler."""
