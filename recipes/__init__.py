"""Hold what patchkit knows: upstream projects with fixes, devices, toolchains, environments."""
