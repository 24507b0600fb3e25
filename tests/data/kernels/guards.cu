// The listings beside this file, made with nvcc 13.0.88 and nvdisasm 13.2.51:
//   nvcc -cubin -gencode arch=compute_120f,code=sm_120f guards.cu -o x && nvdisasm -c x > family.sass
//   nvcc -cubin -gencode arch=compute_121a,code=sm_121a guards.cu -o x && nvdisasm -c x > guarded.sass
//   the latter with -DSM12X > native.sass
#ifdef SM12X
  #define ALLOWED (__CUDA_ARCH__ >= 1200 && __CUDA_ARCH__ < 1300)
#else
  #define ALLOWED (__CUDA_ARCH__ == 1200)
#endif

// FP4 conversion behind a guard without an else: returns at once.
extern "C" __global__ void quantise(const float2* in, unsigned short* out) {
#if ALLOWED
  float2 v = in[threadIdx.x];
  asm("{.reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, %1, %2; cvt.u16.u8 %0, t;}"
      : "=h"(out[threadIdx.x]) : "f"(v.x), "f"(v.y));
#endif
}

// FP8 matrix product behind a guard that traps.
extern "C" __global__ void multiply(const unsigned* a, float* d) {
#if ALLOWED
  const unsigned* p = a + threadIdx.x * 6;
  float* c = d + threadIdx.x * 4;
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "r"(p[4]), "r"(p[5]));
#else
  asm("trap;");
#endif
}

// No tensor core at all: only its size tells that the guard emptied it.
extern "C" __global__ void scale(float4* x, float by) {
#if ALLOWED
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    float4 v = x[threadIdx.x + i * blockDim.x];
    x[threadIdx.x + i * blockDim.x] = make_float4(v.x * by, v.y * by, v.z * by, v.w * by);
  }
#endif
}

// The same for every arch.
extern "C" __global__ void plain(float* x) { x[threadIdx.x] += 1.0f; }
