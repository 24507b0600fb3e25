CUDA_HOME ?= /usr/local/cuda
CUDA_LIB ?= $(CUDA_HOME)/lib64
CUDA_INC ?= $(CUDA_HOME)/include
NVCC ?= $(CUDA_HOME)/bin/nvcc
CUDA_VERSION = $(shell $(NVCC) --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
CUDA_MAJOR = $(shell echo $(CUDA_VERSION) | cut -d "." -f 1)

# You should define NVCC_GENCODE in your environment to the minimal set
# of archs to reduce compile time.
NVCC_GENCODE ?= -gencode=arch=compute_90,code=sm_90

CXXSTD ?= -std=c++17
CXXFLAGS  := $(CXXSTD) -O1 -g -fPIC -fvisibility=hidden -I$(CUDA_INC) $(CXXFLAGS)
NVCUFLAGS := -ccbin $(CXX) $(NVCC_GENCODE) $(CXXSTD) -Xfatbin -compress-all
