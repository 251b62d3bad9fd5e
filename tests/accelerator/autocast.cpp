// Autocast on the simulated device casts what it casts on CUDA: torch's own lists.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

using namespace at;  // torch's lists name their types without it

#define LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FULL_BY_ARGUMENT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define FULL_APPENDED(...) KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE(__VA_ARGS__)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
    AT_FORALL_LOWER_PRECISION_FP(LOW)
    AT_FORALL_FP32(FULL)
    AT_FORALL_FP32_SET_OPT_DTYPE(FULL_BY_ARGUMENT)
    AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(FULL_APPENDED)
    AT_FORALL_PROMOTE(WIDEST)
}
