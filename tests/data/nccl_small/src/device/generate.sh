#!/bin/sh
# generate.sh FOLDER [KERNELS]: a source file for each kernel, and their list.
kernels=${2:-sum max}
for kernel in $kernels; do
  # A static variable alone is exported to nobody, and named after the module.
  cat > "$1/$kernel.cu" <<EOF
static __device__ int calls;
__global__ void $kernel(int *result) { result[threadIdx.x] += atomicAdd(&calls, 1); }
EOF
done
echo "KERNELS := $kernels" > "$1/rules.mk"
