"""What patchkit reads of vLLM's setup.py; the backend of this small tree builds without it."""

ext_modules = []
ext_modules.append(CMakeExtension(name="vllm.small_C"))  # noqa: F821
ext_modules.append(CMakeExtension(name="vllm.other_C"))  # noqa: F821
