"""Keep the folder of finished wheels: contents, manifest, signature, and what is wrong with it."""
