"""Keep the folder of finished wheels: contents, lock, signature, and what is wrong with it."""
