// Vectors of the instruction set that the including file is compiled for: fp32 lanes, and the 16-bit formats around
// them. Included by loops_impl.hpp only. See Note [Instruction sets].
//
// The types are the compiler's generic vectors (GCC and Clang), whose operators mean the same on every machine;
// intrinsics stand only where no operator does (fma, square root, 16-bit conversions).
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstddef>
#include <cstdint>

#define OUTSIZE_INLINE [[gnu::always_inline]] inline

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define OUTSIZE_AVX512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define OUTSIZE_AVX2
#endif

namespace outsize {

namespace {

#if defined(OUTSIZE_AVX512)
constexpr std::size_t kLanes = 16;
#elif defined(OUTSIZE_AVX2)
constexpr std::size_t kLanes = 8;
#else
constexpr std::size_t kLanes = 4;
#endif

typedef float F32 __attribute__((vector_size(4 * kLanes)));
typedef std::int32_t I32 __attribute__((vector_size(4 * kLanes)));
typedef std::uint32_t U32 __attribute__((vector_size(4 * kLanes)));
typedef std::int16_t I16 __attribute__((vector_size(2 * kLanes)));
typedef std::uint16_t U16 __attribute__((vector_size(2 * kLanes)));
typedef std::int8_t I8 __attribute__((vector_size(kLanes)));
typedef std::uint8_t U8 __attribute__((vector_size(kLanes)));

template <class To, class From>
OUTSIZE_INLINE To bits_as(From value) {
    return __builtin_bit_cast(To, value);
}

template <class Vector>
OUTSIZE_INLINE Vector load(const void* address) {
    Vector vector;
    __builtin_memcpy(&vector, address, sizeof(vector));
    return vector;
}

template <class Vector>
OUTSIZE_INLINE void store(void* address, Vector vector) {
    __builtin_memcpy(address, &vector, sizeof(vector));
}

OUTSIZE_INLINE F32 all(float value) { return value - F32{}; }

// a * b + c, rounded once.
OUTSIZE_INLINE F32 fma(F32 a, F32 b, F32 c) {
#if defined(OUTSIZE_AVX512)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(OUTSIZE_AVX2)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    for (std::size_t i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

OUTSIZE_INLINE F32 sqrt(F32 value) {
#if defined(OUTSIZE_AVX512)
    return _mm512_sqrt_ps(value);
#elif defined(OUTSIZE_AVX2)
    return _mm256_sqrt_ps(value);
#elif defined(__aarch64__)
    return vsqrtq_f32(value);
#elif defined(__x86_64__)
    return _mm_sqrt_ps(value);
#else
    for (std::size_t i = 0; i < kLanes; ++i) value[i] = __builtin_sqrtf(value[i]);
    return value;
#endif
}

OUTSIZE_INLINE F32 magnitude(F32 value) { return bits_as<F32>(bits_as<U32>(value) & 0x7fffffffu); }

// Note [Conversions by hand]
// GCC's __builtin_convertvector between 8, 16 and 32 bits takes two to ten times the instructions that AVX2 needs, and
// four where AVX-512 needs one to widen. The update is short of places in the processor's window, not of arithmetic.

template <class To, class From>
OUTSIZE_INLINE To converted(From value) {
#if defined(OUTSIZE_AVX512)
    if constexpr (__is_same(From, U16)) return bits_as<To>(_mm512_cvtepu16_epi32(bits_as<__m256i>(value)));
    if constexpr (__is_same(From, I16)) return bits_as<To>(_mm512_cvtepi16_epi32(bits_as<__m256i>(value)));
    if constexpr (__is_same(From, U8)) return bits_as<To>(_mm512_cvtepu8_epi32(bits_as<__m128i>(value)));
    if constexpr (__is_same(From, I8)) return bits_as<To>(_mm512_cvtepi8_epi32(bits_as<__m128i>(value)));
    if constexpr (__is_same(To, U8)) return bits_as<To>(_mm512_cvtepi32_epi8(bits_as<__m512i>(value)));
#elif defined(OUTSIZE_AVX2)
    if constexpr (__is_same(From, U16)) return bits_as<To>(_mm256_cvtepu16_epi32(bits_as<__m128i>(value)));
    if constexpr (__is_same(From, I16)) return bits_as<To>(_mm256_cvtepi16_epi32(bits_as<__m128i>(value)));
    if constexpr (__is_same(From, U8))
        return bits_as<To>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bits_as<long long>(value))));
    if constexpr (__is_same(From, I8))
        return bits_as<To>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bits_as<long long>(value))));
    if constexpr (__is_same(To, U8)) {  // the low byte of every lane
        const __m256i bytes = _mm256_shuffle_epi8(bits_as<__m256i>(value), _mm256_set1_epi32(0x0c080400));
        const __m256i both = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
        return bits_as<To>(_mm_cvtsi128_si64(_mm256_castsi256_si128(both)));
    }
#else
    return __builtin_convertvector(value, To);
#endif
}

// ------------------------------------------------------------------------------------------------ number formats

struct Float32 {
    using Storage = float;
    OUTSIZE_INLINE static F32 read(const float* source) { return load<F32>(source); }
};

struct BFloat16 {
    using Storage = std::uint16_t;
    OUTSIZE_INLINE static F32 read(const std::uint16_t* source) {
        return bits_as<F32>(converted<U32>(load<U16>(source)) << 16);
    }
};

struct Float16 {
    using Storage = std::uint16_t;
    OUTSIZE_INLINE static F32 read(const std::uint16_t* source) {
#if defined(OUTSIZE_AVX512)
        return _mm512_cvtph_ps(load<__m256i>(source));
#elif defined(OUTSIZE_AVX2)
        return _mm256_cvtph_ps(load<__m128i>(source));
#elif defined(__aarch64__)
        return vcvt_f32_f16(load<float16x4_t>(source));
#else
        const U32 bits = converted<U32>(load<U16>(source));
        const U32 exponent = bits & 0x7c00u;
        const U32 shifted = (bits & 0x7fffu) << 13;
        const U32 normal = shifted + (112u << 23);
        const U32 special = shifted + (224u << 23);  // inf and NaN keep the largest exponent
        // A subnormal is its 10 bits above 2^-14, less that 2^-14: exact, also where subnormals are flushed to zero.
        const F32 above = bits_as<F32>((shifted & 0x007fe000u) | (113u << 23));
        const U32 subnormal = bits_as<U32>(above - 0x1p-14f);
        const U32 value = exponent == 0x7c00u ? special : exponent == 0u ? subnormal : normal;
        return bits_as<F32>((bits & 0x8000u) << 16 | value);
#endif
    }

    // Rounds to nearest even; what is too large becomes infinity.
    OUTSIZE_INLINE static void write(std::uint16_t* target, F32 value) {
#if defined(OUTSIZE_AVX512)
        store(target, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(OUTSIZE_AVX2)
        store(target, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
        store(target, vcvt_f16_f32(value));
#else
        const U32 bits = bits_as<U32>(value);
        const U32 large = bits & 0x7fffffffu;
        // Adding half a unit of the last place, less one bit where the place is even, and cutting off rounds to even.
        const U32 normal = (large - (112u << 23) + 0xfffu + ((large >> 13) & 1u)) >> 13;
        // Below 2^-14 the fixed last place 2^-24 is that of 0.5 in fp32: the addition rounds.
        const U32 subnormal = bits_as<U32>(bits_as<F32>(large) + 0.5f) - bits_as<U32>(all(0.5f));
        const U32 nan = 0x7e00u | ((large >> 13) & 0x3ffu);
        U32 half = large < (113u << 23) ? subnormal : normal;
        half = large >= 0x477ff000u ? U32{} + 0x7c00u : half;  // 65520, halfway from the largest to 65536
        half = large > 0x7f800000u ? nan : half;
        store(target, __builtin_convertvector((bits >> 16 & 0x8000u) | half, U16));
#endif
    }
};

// Note [Split master]
// An fp32 master weight is kept as the bf16 weight that computes and a signed 16-bit remainder:
// bits(master) = (bf16_bits << 16) + remainder, with bf16_bits = (bits(master) + 0x8000) >> 16, i.e. the master rounded
// to nearest, ties away from zero. All of it is arithmetic modulo 2^32, so the round trip is exact for every bit
// pattern. Infinities split into themselves and 0. A finite master beyond bf16's largest reads as infinity in bf16, as
// rounding demands. A NaN whose payload is all ones reads as zero in bf16 (the master stays NaN); the NaNs that
// arithmetic makes read as NaN. AVX512-BF16's own conversion (VCVTNEPS2BF16) rounds ties to even and flushes
// subnormals, so it cannot give these bits; integer arithmetic serves every instruction set.
struct Split {
    OUTSIZE_INLINE static F32 read(const std::uint16_t* bf16, const std::int16_t* remainder) {
        const U32 high = converted<U32>(load<U16>(bf16)) << 16;
        return bits_as<F32>(high + bits_as<U32>(converted<I32>(load<I16>(remainder))));
    }

    // The low half of bits(master), read as signed, is exactly what rounding left over.
    OUTSIZE_INLINE static void write(std::uint16_t* bf16, std::int16_t* remainder, F32 master) {
        const U32 rounded = bits_as<U32>(master) + 0x8000u;  // which flips the highest bit of the low half
#if defined(OUTSIZE_AVX2)
        // Sorts the halves: within 128 bits, then across.
        const auto halves = bits_as<__m256i>(rounded ^ 0x8000u);
        const __m128i sort = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
        const __m256i near = _mm256_shuffle_epi8(halves, _mm256_broadcastsi128_si256(sort));
        const __m256i sorted = _mm256_permute4x64_epi64(near, 0xd8);
        store(remainder, _mm256_castsi256_si128(sorted));
        store(bf16, _mm256_extracti128_si256(sorted, 1));
#else
        store(bf16, __builtin_convertvector(rounded >> 16, U16));
        store(remainder, __builtin_convertvector(rounded ^ 0x8000u, U16));
#endif
    }
};

// The squares of a vector, exact in double, added to two vectors of sums: fused or not, the same bits.
#if defined(OUTSIZE_AVX512)
typedef __m512d F64;
#elif defined(OUTSIZE_AVX2)
typedef __m256d F64;
#else
typedef double F64 __attribute__((vector_size(16)));
#endif

OUTSIZE_INLINE void add_squares(F32 value, F64& low, F64& high) {
#if defined(OUTSIZE_AVX512)
    const F64 a = _mm512_cvtps_pd(_mm512_castps512_ps256(value)), b = _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1));
#elif defined(OUTSIZE_AVX2)
    const F64 a = _mm256_cvtps_pd(_mm256_castps256_ps128(value)), b = _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1));
#else
    const F64 a = {value[0], value[1]}, b = {value[2], value[3]};
#endif
#if defined(OUTSIZE_AVX512)
    low = _mm512_fmadd_pd(a, a, low);
    high = _mm512_fmadd_pd(b, b, high);
#elif defined(OUTSIZE_AVX2)
    low = _mm256_fmadd_pd(a, a, low);
    high = _mm256_fmadd_pd(b, b, high);
#else
    low += a * a;
    high += b * b;
#endif
}

}  // namespace

}  // namespace outsize
