"""Evidence about a step: losses, modules, places of tokens, experiments."""
