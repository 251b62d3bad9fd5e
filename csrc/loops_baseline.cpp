// The loops for the baseline of the architecture that the compiler targets.
#define OUTSIZE_LOOPS kBaselineLoops
#if defined(__aarch64__)
#define OUTSIZE_LOOPS_NAME "neon"
#else
#define OUTSIZE_LOOPS_NAME "portable"
#endif
#include "loops_impl.hpp"
