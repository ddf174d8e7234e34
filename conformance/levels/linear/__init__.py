"""Level `linear`: linear attention and causal convolutions over the slices of attention, against their recurrences."""
