"""What a forward pass costs: counted on the CPU, and measured on one GPU."""
