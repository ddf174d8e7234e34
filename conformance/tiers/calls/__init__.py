"""Calls that tiers make by hand: malformed ones, other spellings, uses of a layer, and calls of one rank."""
