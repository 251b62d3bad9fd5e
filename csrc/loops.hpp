// The inner loops, by instruction set: what update.cpp and kernels.cpp call, and what loops_impl.hpp implements.
//
// Note [Instruction sets]
// loops_impl.hpp is compiled once per instruction set, each time with other compiler flags, and fills one table of
// function pointers. The table is chosen at run time, so one binary serves every machine. The compiler may fuse nothing
// by itself
// (-ffp-contract=off) and a spelled-out fma is exact everywhere (a library call in the portable set, where the
// processor has none), so all sets give the same bits. These files must not emit functions that another file shares:
// the linker could keep the copy that needs AVX-512. So everything in them lies in an unnamed namespace, and they call
// builtins instead of the standard library.
#pragma once

#include <cstddef>
#include <cstdint>

namespace outsize {

inline constexpr std::size_t kDTypes = 3;  // as counted by DType

// How a weight is kept: the index into the tables below.
enum class WeightFormat : std::uint8_t {
    kFloat32,  // fp32
    kSplit,    // bf16 and its remainder; see Note [Split master] in simd.hpp
    kMaster,   // fp16, which is only written, and the fp32 master, which is the truth
};
inline constexpr std::size_t kWeightFormats = 3;
inline constexpr std::size_t kMostStates = 3;

// What is done to a gradient as it is read: scaled, then clamped (NaN passes).
struct GradScalars {
    float scale, clamp_min, clamp_max;
};

// The memory of one call; nothing overlaps.
struct Span {
    void* param;
    void* master;  // the remainder, the fp32 master, or null
    const void* grad;
    float* states[kMostStates];
    std::size_t numel;
};

struct AdamScalars {
    GradScalars grad;
    float keep;         // what decoupled decay leaves of the weight
    float coupled;      // coupled decay
    float lerp_weight;  // of gradient - moment, added to the nearer of the two
    bool lerp_from_start;
    float beta2, one_minus_beta2;
    float bias_correction2_sqrt, eps, minus_step_size;
};

struct SgdScalars {
    GradScalars grad;
    float coupled;
    float momentum, one_minus_dampening;
    bool nesterov;
    bool first;  // the momentum starts as the gradient
    float minus_lr;
};

struct AdagradScalars {
    GradScalars grad;
    float coupled;
    float eps, minus_step_size;
};

struct LionScalars {
    GradScalars grad;
    float keep;
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float minus_lr;
};

template <class Scalars>
using UpdateLoop = void (*)(const Span&, const Scalars&);

template <class Scalars>
using UpdateLoops = UpdateLoop<Scalars>[kWeightFormats][kDTypes];

struct Loops {
    const char* name;
    UpdateLoops<AdamScalars> adam[2][2];  // [amsgrad][coupled decay]
    UpdateLoops<SgdScalars> sgd_plain;
    UpdateLoops<SgdScalars> sgd_momentum;
    UpdateLoops<AdagradScalars> adagrad;
    UpdateLoops<LionScalars> lion;
    double (*squared_norm[kDTypes])(const void* values, std::size_t numel);
    void (*accumulate[kDTypes])(float* destination, const void* source, std::size_t numel, float scale);
    void (*split_master)(const float* master, std::uint16_t* bf16, std::int16_t* remainder, std::size_t numel);
    void (*join_master)(const std::uint16_t* bf16, const std::int16_t* remainder, float* master, std::size_t numel);
    void (*encode_signed)(const float* values, std::int8_t* codes, float* scales, std::size_t numel);
    void (*encode_root)(const float* values, std::uint8_t* codes, float* scales, std::size_t numel);
    void (*decode_signed)(const std::int8_t* codes, const float* scales, float* values, std::size_t numel);
    void (*decode_root)(const std::uint8_t* codes, const float* scales, float* values, std::size_t numel);
};

extern const Loops kBaselineLoops;  // "portable", or "neon" on aarch64, whose baseline it is
#if defined(__x86_64__)
extern const Loops kAvx2Loops;
extern const Loops kAvx512Loops;
#endif

// The set in use: the widest that the processor has, unless a test forced another.
const Loops& loops();

}  // namespace outsize
