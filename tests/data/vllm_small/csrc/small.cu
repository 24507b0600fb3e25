// What CMake would compile, and for which archs, is what counts.
__global__ void store(int *place) { *place = 1; }
