"""The cost model: machines fitted to records, and its predictions beside them."""
