"""What pytest must not import to look for doctests."""

collect_ignore = ["exits_when_imported.py"]
