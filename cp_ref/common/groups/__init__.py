"""Process groups, collectives, and lost ranks, for both packages."""
