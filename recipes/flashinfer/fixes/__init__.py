"""The fixes of FlashInfer, one a file, each with one FIX."""
