"""Causal convolutions over documents that are spread over ranks: halos of rows, and sums of shifted rows."""
