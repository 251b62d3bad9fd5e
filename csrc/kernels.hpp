// What the kernels share: instruction sets, number formats, the split master.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "native.hpp"

// Note [Instruction sets]
// A loop is an always-inline function; OUTSIZE_DISPATCH compiles it once for the baseline and, on x86, once for AVX2
// with FMA, and calls what the machine has. The compiler fuses nothing by itself (-ffp-contract=off) and a spelled-out
// fma is exact everywhere (a library call in the baseline), so both give the same bits.
#define OUTSIZE_INLINE [[gnu::always_inline]] inline

#if defined(__x86_64__)
#define OUTSIZE_DISPATCH(loop, ...)                                                                \
    do {                                                                                           \
        const auto baseline = [](auto... args) { loop(args...); };                                 \
        const auto avx2 = [](auto... args) __attribute__((target("avx2,fma"))) { loop(args...); }; \
        ::outsize::has_avx2() ? avx2(__VA_ARGS__) : baseline(__VA_ARGS__);                         \
    } while (false)
#else
#define OUTSIZE_DISPATCH(loop, ...) loop(__VA_ARGS__)
#endif

namespace outsize {

#if defined(__x86_64__)
inline bool has_avx2() {
    static const bool answer = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return answer;
}
#endif

// ------------------------------------------------------------------------------------------------ number formats
// Each format names its storage and widens it to fp32 exactly, without branches, so that loops vectorise.

struct Float32 {
    using Storage = float;
    OUTSIZE_INLINE static float widen(float value) { return value; }
};

struct BFloat16 {
    using Storage = std::uint16_t;
    OUTSIZE_INLINE static float widen(std::uint16_t bits) {
        return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
    }
};

struct Float16 {
    using Storage = std::uint16_t;
    OUTSIZE_INLINE static float widen(std::uint16_t bits) {
        const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
        const std::uint32_t exponent = bits & 0x7c00u;
        const std::uint32_t magnitude = static_cast<std::uint32_t>(bits & 0x7fffu) << 13;
        const std::uint32_t normal = magnitude + (112u << 23);
        const std::uint32_t special = magnitude + (224u << 23);  // inf and NaN keep the largest exponent
        // A subnormal is its 10 bits above 2^-14, less that 2^-14: exact, also where subnormals are flushed to zero.
        const float above = std::bit_cast<float>((magnitude & 0x007fe000u) | (113u << 23));
        const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(above - std::bit_cast<float>(113u << 23));
        const std::uint32_t value = exponent == 0x7c00u ? special : exponent == 0 ? subnormal : normal;
        return std::bit_cast<float>(sign | value);
    }
};

// Calls visit(Format{}) with the format of `dtype`.
template <class Visit>
void with_format(DType dtype, Visit visit) {
    switch (dtype) {
        case DType::kFloat32:
            return visit(Float32{});
        case DType::kBFloat16:
            return visit(BFloat16{});
        case DType::kFloat16:
            return visit(Float16{});
    }
}

// -------------------------------------------------------------------------------------------------- split master
// Note [Split master]
// An fp32 master weight is kept as the bf16 weight that computes and a signed 16-bit remainder:
// bits(master) = (bf16_bits << 16) + remainder, with bf16_bits = (bits(master) + 0x8000) >> 16, i.e. the master rounded
// to nearest, ties away from zero. All of it is arithmetic modulo 2^32, so the round trip is exact for every bit
// pattern. Infinities split into themselves and 0. A finite master beyond bf16's largest reads as infinity in bf16, as
// rounding demands. A NaN whose payload is all ones reads as zero in bf16 (the master stays NaN); the NaNs that
// arithmetic makes read as NaN.

OUTSIZE_INLINE float join(std::uint16_t bf16, std::int16_t remainder) {
    const std::uint32_t high = static_cast<std::uint32_t>(bf16) << 16;
    return std::bit_cast<float>(high + static_cast<std::uint32_t>(static_cast<std::int32_t>(remainder)));
}

OUTSIZE_INLINE std::uint16_t rounded_half(float master) {
    return static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(master) + 0x8000u) >> 16);
}

// The low half of bits(master), read as signed, is exactly what rounding left over.
OUTSIZE_INLINE std::int16_t remaining_half(float master) {
    return static_cast<std::int16_t>(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(master)));
}

OUTSIZE_INLINE void split_loop(const float* __restrict master, std::uint16_t* __restrict bf16,
                               std::int16_t* __restrict remainder, std::size_t numel) {
    for (std::size_t i = 0; i < numel; ++i) {
        bf16[i] = rounded_half(master[i]);
        remainder[i] = remaining_half(master[i]);
    }
}

OUTSIZE_INLINE void join_loop(const std::uint16_t* __restrict bf16, const std::int16_t* __restrict remainder,
                              float* __restrict master, std::size_t numel) {
    for (std::size_t i = 0; i < numel; ++i) master[i] = join(bf16[i], remainder[i]);
}

}  // namespace outsize
