"""Ask a server of the OpenAI API, as vLLM is one, with the standard library alone."""
