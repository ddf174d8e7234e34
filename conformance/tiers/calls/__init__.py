"""Tiers about calls: malformed ones, other spellings, and calls of one rank."""
