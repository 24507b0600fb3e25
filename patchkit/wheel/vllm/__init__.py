"""Build vLLM from source: order, inputs, checks beforehand, its own build backend."""
