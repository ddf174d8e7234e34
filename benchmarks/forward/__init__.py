"""The cost of a forward pass: counted on the CPU, and measured on one GPU."""
