// The loops for AVX2 with FMA and F16C; CMakeLists.txt sets the flags.
#if defined(__x86_64__)
#define OUTSIZE_LOOPS kAvx2Loops
#define OUTSIZE_LOOPS_NAME "avx2"
#include "loops_impl.hpp"
#ifndef OUTSIZE_AVX2
#error "this file needs -mavx2 -mfma -mf16c"
#endif
#endif
