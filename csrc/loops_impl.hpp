// The inner loops. Each including file is compiled for one instruction set, defines OUTSIZE_LOOPS (the table's name)
// and OUTSIZE_LOOPS_NAME, and gets the table. See Note [Instruction sets] in loops.hpp.
#pragma once

#include "loops.hpp"
#include "simd.hpp"

namespace outsize {

namespace {

// ------------------------------------------------------------------------------------------------ weight formats

struct WholeWeight {
    static constexpr std::size_t kParamBytes = 4, kMasterBytes = 0;
    OUTSIZE_INLINE static F32 read(const Span& span, std::size_t i) {
        return load<F32>(static_cast<const float*>(span.param) + i);
    }
    OUTSIZE_INLINE static void write(const Span& span, std::size_t i, F32 weight) {
        store(static_cast<float*>(span.param) + i, weight);
    }
};

struct SplitWeight {
    static constexpr std::size_t kParamBytes = 2, kMasterBytes = 2;
    OUTSIZE_INLINE static F32 read(const Span& span, std::size_t i) {
        return Split::read(static_cast<const std::uint16_t*>(span.param) + i,
                           static_cast<const std::int16_t*>(span.master) + i);
    }
    OUTSIZE_INLINE static void write(const Span& span, std::size_t i, F32 weight) {
        Split::write(static_cast<std::uint16_t*>(span.param) + i, static_cast<std::int16_t*>(span.master) + i, weight);
    }
};

struct MasterWeight {
    static constexpr std::size_t kParamBytes = 2, kMasterBytes = 4;
    OUTSIZE_INLINE static F32 read(const Span& span, std::size_t i) {
        return load<F32>(static_cast<const float*>(span.master) + i);
    }
    OUTSIZE_INLINE static void write(const Span& span, std::size_t i, F32 weight) {
        store(static_cast<float*>(span.master) + i, weight);
        Float16::write(static_cast<std::uint16_t*>(span.param) + i, weight);
    }
};

// --------------------------------------------------------------------------------------------------------- rules
// Note [The bits of an update]
// The formulas, their order and their roundings are those of torch's single-tensor optimizers on a CPU with fused
// multiply-add: scalars are computed in double and rounded once; the steps that torch fuses are fused (lerp, addcmul
// and add with alpha); every other operation is rounded separately. So the bits depend neither on the instruction set,
// nor on the number of threads, nor on the alignment, and the states are torch's, bit for bit. A weight of Adam or
// Adagrad can differ in its last bit where torch takes the square root from MKL, which is not always correctly rounded;
// ours is.

OUTSIZE_INLINE F32 prepared(F32 grad, const GradScalars& s) {
    const F32 g = grad * s.scale;
    const F32 raised = g < s.clamp_min ? all(s.clamp_min) : g;
    return raised > s.clamp_max ? all(s.clamp_max) : raised;
}

// One vector of elements: `g` is prepared, `w` and `states` are updated.
//
// Note [Two halves]
// The root and the two quotients of Adam take longer than a processor can look ahead: by the time that the weight is
// written, its window holds few other elements. So Adam runs in two halves, each over a block that stays in the
// first-level cache: one ends with the denominators, the other starts from them, and both keep the divider busy.
template <bool kAmsgrad, bool kCoupled>
struct Adam {
    using Scalars = AdamScalars;
    static constexpr std::size_t kStates = kAmsgrad ? 3 : 2;
    static constexpr bool kHalves = true;

    template <class Weight>
    OUTSIZE_INLINE static F32 denominator(const Weight& weight, F32 g, F32 (&states)[kStates], const Scalars& s) {
        if constexpr (kCoupled) g = fma(all(s.coupled), weight(), g);
        const F32 m = fma(all(s.lerp_weight), g - states[0], s.lerp_from_start ? states[0] : g);
        const F32 v = fma(s.one_minus_beta2 * g, g, states[1] * s.beta2);
        F32 largest = v;
        if constexpr (kAmsgrad) {
            const F32 before = states[2];
            largest = (v > before) | (v != v) ? v : before;
            states[2] = largest;
        }
        states[0] = m;
        states[1] = v;
        return sqrt(largest) / s.bias_correction2_sqrt + s.eps;
    }

    OUTSIZE_INLINE static F32 moved(F32 w, F32 exp_avg, F32 denominator, const Scalars& s) {
        if constexpr (!kCoupled) w = w * s.keep;
        return w + s.minus_step_size * exp_avg / denominator;
    }
};

using DecoupledAdam = Adam<false, false>;
using CoupledAdam = Adam<false, true>;
using DecoupledAmsgrad = Adam<true, false>;
using CoupledAmsgrad = Adam<true, true>;

struct PlainSgd {
    using Scalars = SgdScalars;
    static constexpr std::size_t kStates = 0;
    static constexpr bool kHalves = false;
    OUTSIZE_INLINE static void apply(F32& w, F32 g, F32*, const Scalars& s) {
        if (s.coupled != 0) g = fma(all(s.coupled), w, g);
        w = fma(all(s.minus_lr), g, w);
    }
};

struct MomentumSgd {
    using Scalars = SgdScalars;
    static constexpr std::size_t kStates = 1;
    static constexpr bool kHalves = false;
    OUTSIZE_INLINE static void apply(F32& w, F32 g, F32 (&states)[1], const Scalars& s) {
        if (s.coupled != 0) g = fma(all(s.coupled), w, g);
        const F32 buffer = s.first ? g : fma(all(s.one_minus_dampening), g, states[0] * s.momentum);
        states[0] = buffer;
        w = fma(all(s.minus_lr), s.nesterov ? fma(all(s.momentum), buffer, g) : buffer, w);
    }
};

struct Adagrad {
    using Scalars = AdagradScalars;
    static constexpr std::size_t kStates = 1;
    static constexpr bool kHalves = false;
    OUTSIZE_INLINE static void apply(F32& w, F32 g, F32 (&states)[1], const Scalars& s) {
        if (s.coupled != 0) g = fma(all(s.coupled), w, g);
        states[0] = fma(g, g, states[0]);
        w = w + s.minus_step_size * g / (sqrt(states[0]) + s.eps);
    }
};

struct Lion {
    using Scalars = LionScalars;
    static constexpr std::size_t kStates = 1;
    static constexpr bool kHalves = false;
    OUTSIZE_INLINE static void apply(F32& w, F32 g, F32 (&states)[1], const Scalars& s) {
        const F32 mixed = fma(all(s.one_minus_beta1), g, states[0] * s.beta1);
        const F32 sign = mixed > 0.0f ? all(1.0f) : mixed < 0.0f ? all(-1.0f) : F32{};  // of NaN it is 0, as in torch
        w = fma(all(s.minus_lr), sign, w * s.keep);
        states[0] = fma(all(s.one_minus_beta2), g, states[0] * s.beta2);
    }
};

// --------------------------------------------------------------------------------------------------- one pass

constexpr std::size_t kHalvesVectors = 16;

// Asks for the cache line that lies some way ahead of element `at`, once a line. The processor's own prefetcher does
// not keep up with five streams. An address past the end is no error: nothing is fetched.
constexpr std::size_t kAheadBytes = 2048;
constexpr std::size_t kLineBytes = 64;

template <std::size_t kBytes>
OUTSIZE_INLINE void fetch_ahead(const void* base, std::size_t at, std::size_t vector) {
    if (kBytes == 0 || vector * kLanes * kBytes % kLineBytes != 0) return;
    const auto address = __builtin_bit_cast(std::uintptr_t, base) + at * kBytes + kAheadBytes;
    __builtin_prefetch(__builtin_bit_cast(const void*, address), 1);
}

// `count` vectors from element i on, at most kHalvesVectors of them.
template <class Rule, class Weight, class Grad>
OUTSIZE_INLINE void update_vectors(const Span& span, const typename Rule::Scalars& s, std::size_t i,
                                   std::size_t count) {
    F32 denominators[Rule::kHalves ? kHalvesVectors : 1];
    for (std::size_t n = 0; n < count; ++n) {
        const std::size_t at = i + n * kLanes;
        const F32 grad = prepared(Grad::read(static_cast<const typename Grad::Storage*>(span.grad) + at), s.grad);
        F32 states[Rule::kStates + (Rule::kStates == 0)];
        for (std::size_t k = 0; k < Rule::kStates; ++k) {
            states[k] = load<F32>(span.states[k] + at);
            fetch_ahead<sizeof(float)>(span.states[k], at, n);
        }
        fetch_ahead<sizeof(typename Grad::Storage)>(span.grad, at, n);
        fetch_ahead<Weight::kParamBytes>(span.param, at, n);
        fetch_ahead<Weight::kMasterBytes>(span.master, at, n);
        if constexpr (Rule::kHalves) {
            denominators[n] = Rule::denominator([&] { return Weight::read(span, at); }, grad, states, s);
        } else {
            F32 weight = Weight::read(span, at);
            Rule::apply(weight, grad, states, s);
            Weight::write(span, at, weight);
        }
        for (std::size_t k = 0; k < Rule::kStates; ++k) store(span.states[k] + at, states[k]);
    }
    if constexpr (Rule::kHalves) {
        for (std::size_t n = 0; n < count; ++n) {
            const std::size_t at = i + n * kLanes;
            const F32 weight = Weight::read(span, at);
            Weight::write(span, at, Rule::moved(weight, load<F32>(span.states[0] + at), denominators[n], s));
        }
    }
}

// Copies one vector's place of every array in or out.
template <class Rule, class Weight, class Grad, class Copy>
OUTSIZE_INLINE void copy_arrays(const Span& span, std::size_t i, const Span& own, std::size_t count, Copy copy) {
    const auto place = [i](void* base, std::size_t bytes) { return static_cast<char*>(base) + i * bytes; };
    copy(own.param, place(span.param, Weight::kParamBytes), count * Weight::kParamBytes);
    if constexpr (Weight::kMasterBytes > 0)
        copy(own.master, place(span.master, Weight::kMasterBytes), count * Weight::kMasterBytes);
    for (std::size_t k = 0; k < Rule::kStates; ++k) copy(own.states[k], span.states[k] + i, count * sizeof(float));
}

// The elements after the last whole vector, in a vector of their own: the same arithmetic.
template <class Rule, class Weight, class Grad>
void update_rest(const Span& span, const typename Rule::Scalars& s, std::size_t i) {
    const std::size_t count = span.numel - i;
    float weights[kLanes] = {}, masters[kLanes] = {}, states[kMostStates][kLanes] = {};
    typename Grad::Storage grads[kLanes] = {};
    const Span own{weights, masters, grads, {states[0], states[1], states[2]}, kLanes};
    __builtin_memcpy(grads, static_cast<const typename Grad::Storage*>(span.grad) + i, count * sizeof(grads[0]));
    copy_arrays<Rule, Weight, Grad>(span, i, own, count, [](void* mine, const void* theirs, std::size_t bytes) {
        __builtin_memcpy(mine, theirs, bytes);
    });
    update_vectors<Rule, Weight, Grad>(own, s, 0, 1);
    copy_arrays<Rule, Weight, Grad>(span, i, own, count, [](const void* mine, void* theirs, std::size_t bytes) {
        __builtin_memcpy(theirs, mine, bytes);
    });
}

template <class Rule, class Weight, class Grad>
void update(const Span& arrays, const typename Rule::Scalars& scalars) {
    const Span span = arrays;  // copies: nothing that the loop writes can be one of them
    const typename Rule::Scalars s = scalars;
    constexpr std::size_t kBlockElements = kHalvesVectors * kLanes;
    std::size_t i = 0;
    for (; i + kBlockElements <= span.numel; i += kBlockElements)
        update_vectors<Rule, Weight, Grad>(span, s, i, kHalvesVectors);
    for (; i + kLanes <= span.numel; i += kLanes) update_vectors<Rule, Weight, Grad>(span, s, i, 1);
    if (i < span.numel) update_rest<Rule, Weight, Grad>(span, s, i);
}

#define OUTSIZE_BY_GRAD(rule, weight) \
    {update<rule, weight, Float32>, update<rule, weight, BFloat16>, update<rule, weight, Float16>}
#define OUTSIZE_UPDATES(rule) \
    {OUTSIZE_BY_GRAD(rule, WholeWeight), OUTSIZE_BY_GRAD(rule, SplitWeight), OUTSIZE_BY_GRAD(rule, MasterWeight)}

// ------------------------------------------------------------------------------------------------- small kernels

// Element i goes to sum i % kSums, the sums are added in order: one order on every machine.
constexpr std::size_t kSums = 16;

template <class Format>
double squared_norm_loop(const void* values, std::size_t numel) {
    const auto* source = static_cast<const typename Format::Storage*>(values);
    F64 sums[kSums / kLanes][2] = {};
    const auto add = [&sums](const typename Format::Storage* from) {
        for (std::size_t k = 0; k < kSums / kLanes; ++k)
            add_squares(Format::read(from + k * kLanes), sums[k][0], sums[k][1]);
    };
    std::size_t i = 0;
    for (; i + kSums <= numel; i += kSums) add(source + i);
    if (i < numel) {
        typename Format::Storage rest[kSums] = {};
        __builtin_memcpy(rest, source + i, (numel - i) * sizeof(rest[0]));
        add(rest);
    }
    double each[kSums];
    __builtin_memcpy(each, sums, sizeof(each));
    double total = 0;
    for (const double sum : each) total += sum;
    return total;
}

template <class Format>
void accumulate_loop(float* destination, const void* values, std::size_t numel, float scale) {
    const auto* source = static_cast<const typename Format::Storage*>(values);
    const auto add = [scale](float* to, const typename Format::Storage* from) {
        store(to, load<F32>(to) * scale + Format::read(from));
    };
    std::size_t i = 0;
    for (; i + kLanes <= numel; i += kLanes) add(destination + i, source + i);
    if (i < numel) {
        float to[kLanes] = {};
        typename Format::Storage from[kLanes] = {};
        __builtin_memcpy(to, destination + i, (numel - i) * sizeof(to[0]));
        __builtin_memcpy(from, source + i, (numel - i) * sizeof(from[0]));
        add(to, from);
        __builtin_memcpy(destination + i, to, (numel - i) * sizeof(to[0]));
    }
}

void split_loop(const float* master, std::uint16_t* bf16, std::int16_t* remainder, std::size_t numel) {
    std::size_t i = 0;
    for (; i + kLanes <= numel; i += kLanes) Split::write(bf16 + i, remainder + i, load<F32>(master + i));
    if (i < numel) {
        float whole[kLanes] = {};
        std::uint16_t high[kLanes];
        std::int16_t low[kLanes];
        __builtin_memcpy(whole, master + i, (numel - i) * sizeof(whole[0]));
        Split::write(high, low, load<F32>(whole));
        __builtin_memcpy(bf16 + i, high, (numel - i) * sizeof(high[0]));
        __builtin_memcpy(remainder + i, low, (numel - i) * sizeof(low[0]));
    }
}

void join_loop(const std::uint16_t* bf16, const std::int16_t* remainder, float* master, std::size_t numel) {
    std::size_t i = 0;
    for (; i + kLanes <= numel; i += kLanes) store(master + i, Split::read(bf16 + i, remainder + i));
    if (i < numel) {
        std::uint16_t high[kLanes] = {};
        std::int16_t low[kLanes] = {};
        float whole[kLanes];
        __builtin_memcpy(high, bf16 + i, (numel - i) * sizeof(high[0]));
        __builtin_memcpy(low, remainder + i, (numel - i) * sizeof(low[0]));
        store(whole, Split::read(high, low));
        __builtin_memcpy(master + i, whole, (numel - i) * sizeof(whole[0]));
    }
}

// ------------------------------------------------------------------------------------------------- 8-bit states
// Note [8-bit states]
// A state is kept as one byte an element and one fp32 scale per block of 64 (after FlashOptim). A signed array (a
// moment of the gradient) is compressed by 2u / (1 + |u|) before it is rounded, which spends the codes on small values:
// code = round(254 u / (1 + |u|)) with u = x / scale, and back u = code / (254 - |code|). An array of squares is kept
// by its root: code = round(255 sqrt(x) / scale), and at least 1 where x > 0: a zero under the root would blow the
// update up. What was decoded encodes to the same bytes, so a checkpoint may hold decoded values. The largest value
// decodes to the scale itself; the rest is a matter of range: a signed block below the smallest normal number is kept
// as zeros, and the scale of a root is at least 2^-63, above which squares keep enough bits. A block with a value that
// is not finite decodes to NaN throughout: nothing is hidden.
constexpr std::size_t kBlock = 64;
constexpr float kRound =
    12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to the nearest integer, ties to even
constexpr float kSmallestScale = 0x1p-126f, kSmallestRoot = 0x1p-63f;
constexpr float kOne255th = 1.0f / 255.0f;

// The largest of a block of magnitudes; what is not finite counts as larger than all else.
OUTSIZE_INLINE float largest_of(const F32 (&vectors)[kBlock / kLanes]) {
    I32 most{};
    for (const F32& vector : vectors) {
        const I32 bits = bits_as<I32>(magnitude(vector));
        most = bits > most ? bits : most;
    }
    std::int32_t largest = 0;
    for (std::size_t lane = 0; lane < kLanes; ++lane) largest = most[lane] > largest ? most[lane] : largest;
    return __builtin_bit_cast(float, largest);
}

struct SignedCode {
    using Code = std::int8_t;
    OUTSIZE_INLINE static F32 measured(F32 value) { return value; }
    OUTSIZE_INLINE static float scale_of(float largest) { return largest < kSmallestScale ? 0.0f : largest; }
    OUTSIZE_INLINE static float factor_of(float scale) { return 1.0f / scale; }
    OUTSIZE_INLINE static F32 encode(F32 value, float factor) {
        const F32 u = value * factor;
        return 254.0f * u / (1.0f + magnitude(u));
    }
    OUTSIZE_INLINE static F32 decode(const Code* codes, float scale) {
        const F32 code = __builtin_convertvector(converted<I32>(load<I8>(codes)), F32);
        return code / (254.0f - magnitude(code)) * scale;
    }
};

struct RootCode {
    using Code = std::uint8_t;
    OUTSIZE_INLINE static F32 measured(F32 value) { return sqrt(value); }
    OUTSIZE_INLINE static float scale_of(float largest) {
        return largest > 0 && largest < kSmallestRoot ? kSmallestRoot : largest;
    }
    OUTSIZE_INLINE static float factor_of(float scale) { return 255.0f / scale; }
    OUTSIZE_INLINE static F32 encode(F32 root, float factor) {
        const F32 code = root * factor;
        return (root > 0.0f) & (code < 1.0f) ? all(1.0f) : code;
    }
    OUTSIZE_INLINE static F32 decode(const Code* codes, float scale) {
        const F32 code = __builtin_convertvector(converted<I32>(load<U8>(codes)), F32);
        const F32 root = code * kOne255th * scale;
        return root * root;
    }
};

template <class Format>
OUTSIZE_INLINE void encode_block(const float* values, typename Format::Code* codes, float* scale) {
    F32 vectors[kBlock / kLanes];
    for (std::size_t k = 0; k < kBlock / kLanes; ++k) vectors[k] = Format::measured(load<F32>(values + k * kLanes));
    *scale = Format::scale_of(largest_of(vectors));
    if (!(*scale > 0 && *scale <= __FLT_MAX__)) {
        if (*scale != 0) *scale = __builtin_nanf("");
        __builtin_memset(codes, 0, kBlock);
        return;
    }
    const float factor = Format::factor_of(*scale);
    for (std::size_t k = 0; k < kBlock / kLanes; ++k) {
        const U32 code = bits_as<U32>(Format::encode(vectors[k], factor) + kRound);
        store(codes + k * kLanes, converted<U8>(code));
    }
}

template <class Format>
OUTSIZE_INLINE void decode_block(const typename Format::Code* codes, float scale, float* values) {
    for (std::size_t at = 0; at < kBlock; at += kLanes) store(values + at, Format::decode(codes + at, scale));
}

template <class Format>
void encode_loop(const float* values, typename Format::Code* codes, float* scales, std::size_t numel) {
    std::size_t i = 0;
    for (; i + kBlock <= numel; i += kBlock) encode_block<Format>(values + i, codes + i, scales + i / kBlock);
    if (i < numel) {
        float block[kBlock] = {};
        typename Format::Code out[kBlock];
        __builtin_memcpy(block, values + i, (numel - i) * sizeof(float));
        encode_block<Format>(block, out, scales + i / kBlock);
        __builtin_memcpy(codes + i, out, numel - i);
    }
}

template <class Format>
void decode_loop(const typename Format::Code* codes, const float* scales, float* values, std::size_t numel) {
    std::size_t i = 0;
    for (; i + kBlock <= numel; i += kBlock) decode_block<Format>(codes + i, scales[i / kBlock], values + i);
    if (i < numel) {
        typename Format::Code block[kBlock] = {};
        float out[kBlock];
        __builtin_memcpy(block, codes + i, numel - i);
        decode_block<Format>(block, scales[i / kBlock], out);
        __builtin_memcpy(values + i, out, (numel - i) * sizeof(float));
    }
}

}  // namespace

const Loops OUTSIZE_LOOPS = {
    .name = OUTSIZE_LOOPS_NAME,
    .adam = {{OUTSIZE_UPDATES(DecoupledAdam), OUTSIZE_UPDATES(CoupledAdam)},
             {OUTSIZE_UPDATES(DecoupledAmsgrad), OUTSIZE_UPDATES(CoupledAmsgrad)}},
    .sgd_plain = OUTSIZE_UPDATES(PlainSgd),
    .sgd_momentum = OUTSIZE_UPDATES(MomentumSgd),
    .adagrad = OUTSIZE_UPDATES(Adagrad),
    .lion = OUTSIZE_UPDATES(Lion),
    .squared_norm = {squared_norm_loop<Float32>, squared_norm_loop<BFloat16>, squared_norm_loop<Float16>},
    .accumulate = {accumulate_loop<Float32>, accumulate_loop<BFloat16>, accumulate_loop<Float16>},
    .split_master = split_loop,
    .join_master = join_loop,
    .encode_signed = encode_loop<SignedCode>,
    .encode_root = encode_loop<RootCode>,
    .decode_signed = decode_loop<SignedCode>,
    .decode_root = decode_loop<RootCode>,
};

}  // namespace outsize
