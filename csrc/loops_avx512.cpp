// The loops for AVX-512 (F, BW, DQ, VL); CMakeLists.txt sets the flags.
#if defined(__x86_64__)
#define OUTSIZE_LOOPS kAvx512Loops
#define OUTSIZE_LOOPS_NAME "avx512"
#include "loops_impl.hpp"
#ifndef OUTSIZE_AVX512
#error "this file needs -mavx512f -mavx512bw -mavx512dq -mavx512vl"
#endif
#endif
