"""The scripts of benchmarks, as far as a CPU goes, and the pages that they write."""
