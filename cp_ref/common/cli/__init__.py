"""What the command lines of both packages share: options that describe a problem, tables, and refusals on one line."""
