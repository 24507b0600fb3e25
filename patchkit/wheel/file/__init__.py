"""Read and write a wheel as a file: name, RECORD, METADATA, members, tags, SBOM."""
