"""What happens on a machine that runs vLLM; it needs nothing of patching and of wheels."""
