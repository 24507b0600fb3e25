"""Hold what patchkit knows: upstream projects with their fixes, devices, toolchains, environments."""
