"""Run functions of patchkit on other machines, over the user's own ssh, with nothing installed."""
