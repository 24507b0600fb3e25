"""Read shell scripts and command lines without running them, in containers as well."""
