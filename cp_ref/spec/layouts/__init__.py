"""Layouts: the rows of each rank, and the cuts, shifts and costs that follow from them."""
