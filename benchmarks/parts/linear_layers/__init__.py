"""Parts of the scripts that play and time linear layers on GPUs."""
