"""Code that the integrations share."""
