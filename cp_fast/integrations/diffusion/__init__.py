"""The parts of `cp_fast.integrations.diffusers`."""
