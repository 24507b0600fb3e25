"""Check env files and scripts that anybody wrote: names, values, contradictions, secrets."""
