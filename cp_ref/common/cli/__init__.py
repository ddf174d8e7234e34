"""Shared by the command lines of both packages: options that describe a problem, tables, and refusals on one line."""
