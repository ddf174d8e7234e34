"""What `cp_fast.integrations.diffusers` is made of."""
