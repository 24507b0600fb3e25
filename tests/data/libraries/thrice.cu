__global__ void thrice(float *values) { values[threadIdx.x] *= 3; }
