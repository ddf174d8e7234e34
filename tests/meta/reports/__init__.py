"""What the suite reports: its page, coverage, known failures."""
