"""The files of a torch that a stand-in reads: laid out as in its wheels, and never to be run."""

from support import write_files

# What torch's CMake asks a toolkit for.
LIBRARIES = ("cublas", "cublasLt", "cudart", "cufft", "cusolver", "cusparse", "nvrtc")
HEADERS = ("cublas_v2.h", "cuda_runtime.h", "cusolverDn.h", "cusparse.h")

FILES = {
    "torch-2.15.0.dist-info/METADATA": "Name: torch\nVersion: 2.15.0\n\ntext",
    "torch/__init__.py": 'raise SystemExit("the target\'s torch was run")\n',
    "torch/version.py": """\
from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip']
__version__ = '2.15.0+cu130'
debug = False
cuda: Optional[str] = '13.0'
hip: Optional[str] = None
xpu: Optional[str] = None
late: Optional[str]
""",
    "torch/utils/cpp_extension.py": """\
raise SystemExit("the target's torch was run")

COMMON_NVCC_FLAGS = [
    '-D__CUDA_NO_HALF_OPERATORS__',
    '--expt-relaxed-constexpr'
]
CUDA_HOME = _find_cuda_home()
""",
}


def small_torch(home):
    """A site-packages folder with a torch for another CPU, in small."""
    return write_files(home, FILES)


def site(python):
    """The site-packages folder of a virtual environment's interpreter."""
    (folder,) = python.parents[1].glob("lib/python3*/site-packages")
    return folder
