// AdamW in one pass over memory: widen, scale, clamp, decay, moments, step, round.
//
// Note [The bits of AdamW]
// The formula, its order and its roundings are those of torch's single-tensor Adam on a CPU with fused multiply-add:
// scalars are computed in double and rounded once; three steps are fused, because torch fuses them there (lerp, addcmul
// and add with alpha); every other operation is rounded separately. The fused steps are spelled out (`fma`) and the
// compiler may fuse nothing else, so the bits depend neither on the instruction set, nor on the number of threads, nor
// on the alignment. exp_avg and exp_avg_sq are torch's, bit for bit. The weight can differ in its last bit where torch
// takes the square root from MKL, which is not always correctly rounded; ours is.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels.hpp"

namespace outsize {

namespace {

struct Scalars {
    explicit Scalars(const AdamW& options) {
        const auto step = static_cast<double>(options.step);
        grad_scale = static_cast<float>(options.grad_scale);
        clamp_min = static_cast<float>(options.clamp_min);
        clamp_max = static_cast<float>(options.clamp_max);
        sign = options.maximize ? 0x80000000u : 0u;
        keep = options.decoupled ? static_cast<float>(1 - options.lr * options.weight_decay) : 1.0f;
        weight_decay = static_cast<float>(options.weight_decay);
        const auto weight = static_cast<float>(1 - options.beta1);
        lerp_from_start = std::fabs(weight) < 0.5f;
        lerp_weight = lerp_from_start ? weight : weight - 1;
        beta2 = static_cast<float>(options.beta2);
        one_minus_beta2 = static_cast<float>(1 - options.beta2);
        bias_correction2_sqrt = static_cast<float>(std::pow(1 - std::pow(options.beta2, step), 0.5));
        eps = static_cast<float>(options.eps);
        minus_step_size = static_cast<float>(-(options.lr / (1 - std::pow(options.beta1, step))));
    }

    float grad_scale, clamp_min, clamp_max;
    std::uint32_t sign;  // flips the gradient's
    float keep;          // what decoupled decay leaves of the weight
    float weight_decay;  // coupled
    float lerp_weight;   // of gradient - moment, added to the nearer of the two
    bool lerp_from_start;
    float beta2, one_minus_beta2;
    float bias_correction2_sqrt, eps, minus_step_size;
};

OUTSIZE_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

template <bool kCoupled, bool kAmsgrad>
OUTSIZE_INLINE void update_block(float* __restrict weight, const float* __restrict grad, float* __restrict exp_avg,
                                 float* __restrict exp_avg_sq, float* __restrict max_exp_avg_sq, const Scalars& s,
                                 std::size_t numel) {
    for (std::size_t i = 0; i < numel; ++i) {
        float w = weight[i];
        float g = grad[i] * s.grad_scale;
        g = g < s.clamp_min ? s.clamp_min : g;  // NaN passes
        g = g > s.clamp_max ? s.clamp_max : g;
        g = std::bit_cast<float>(std::bit_cast<std::uint32_t>(g) ^ s.sign);
        if constexpr (kCoupled)
            g = fma(s.weight_decay, w, g);
        else
            w = w * s.keep;

        const float m = fma(s.lerp_weight, g - exp_avg[i], s.lerp_from_start ? exp_avg[i] : g);
        const float v = fma(s.one_minus_beta2 * g, g, exp_avg_sq[i] * s.beta2);
        exp_avg[i] = m;
        exp_avg_sq[i] = v;

        float largest = v;
        if constexpr (kAmsgrad) {
            const float before = max_exp_avg_sq[i];
            largest = v > before || v != v ? v : before;
            max_exp_avg_sq[i] = largest;
        }
        const float denominator = std::sqrt(largest) / s.bias_correction2_sqrt + s.eps;
        weight[i] = w + s.minus_step_size * m / denominator;
    }
}

// Note [Blocks]
// Compilers do not vectorise a loop over both 16-bit and 32-bit arrays well. What is not fp32 is widened, a block at a
// time, into a buffer that stays in the first-level cache, and every loop is over one width.
constexpr std::size_t kBlockElements = 128;

template <class Grad, bool kSplit, bool kCoupled, bool kAmsgrad>
OUTSIZE_INLINE void update_range(const AdamWArrays& arrays, const Scalars& scalars, std::size_t begin,
                                 std::size_t end) {
    const Scalars s = scalars;
    float weight_block[kBlockElements];
    float grad_block[kBlockElements];
    for (std::size_t at = begin; at < end; at += kBlockElements) {
        const std::size_t numel = std::min(kBlockElements, end - at);

        const auto* source = static_cast<const typename Grad::Storage*>(arrays.grad) + at;
        const float* grad;
        if constexpr (std::is_same_v<Grad, Float32>) {
            grad = source;
        } else {
            for (std::size_t i = 0; i < numel; ++i) grad_block[i] = Grad::widen(source[i]);
            grad = grad_block;
        }

        float* weight;
        if constexpr (kSplit) {
            join_loop(static_cast<const std::uint16_t*>(arrays.param) + at, arrays.remainder + at, weight_block, numel);
            weight = weight_block;
        } else {
            weight = static_cast<float*>(arrays.param) + at;
        }

        float* max_exp_avg_sq = kAmsgrad ? arrays.max_exp_avg_sq + at : nullptr;
        update_block<kCoupled, kAmsgrad>(weight, grad, arrays.exp_avg + at, arrays.exp_avg_sq + at, max_exp_avg_sq, s,
                                         numel);

        if constexpr (kSplit)
            split_loop(weight_block, static_cast<std::uint16_t*>(arrays.param) + at, arrays.remainder + at, numel);
    }
}

using Update = void (*)(const AdamWArrays&, const Scalars&, std::size_t begin, std::size_t end);

template <class Grad, bool... kFlags>
void update(const AdamWArrays& arrays, const Scalars& scalars, std::size_t begin, std::size_t end) {
    OUTSIZE_DISPATCH((update_range<Grad, kFlags...>), arrays, scalars, begin, end);
}

// Turns a run-time flag into a template argument.
template <class Visit>
Update choose(bool flag, Visit visit) {
    return flag ? visit(std::true_type{}) : visit(std::false_type{});
}

Update choose_update(const AdamWArrays& arrays, const AdamW& options) {
    Update chosen = nullptr;
    const bool coupled = !options.decoupled && options.weight_decay != 0;
    with_format(arrays.grad_dtype, [&]<class Grad>(Grad) {
        chosen = choose(arrays.remainder != nullptr, [&](auto split) {
            return choose(coupled, [&](auto coupled) {
                return choose(arrays.max_exp_avg_sq != nullptr,
                              [&](auto amsgrad) -> Update { return &update<Grad, split(), coupled(), amsgrad()>; });
            });
        });
    });
    return chosen;
}

// Parts are whole pages of the smallest element, so that threads share no cache line; smaller work is not worth waking.
constexpr std::size_t kPartElements = 4096;

}  // namespace

void adamw(const AdamWArrays& arrays, const AdamW& options, int threads) {
    const Scalars scalars(options);
    const Update update = choose_update(arrays, options);
    const std::size_t pages = (arrays.numel + kPartElements - 1) / kPartElements;
    const std::size_t parts = std::clamp<std::size_t>(pages / 4, 1, static_cast<std::size_t>(threads));
    run_parts(static_cast<int>(parts), [&](int part) {
        const std::size_t begin = pages * static_cast<std::size_t>(part) / parts * kPartElements;
        const std::size_t end = pages * (static_cast<std::size_t>(part) + 1) / parts * kPartElements;
        update(arrays, scalars, std::min(begin, arrays.numel), std::min(end, arrays.numel));
    });
}

}  // namespace outsize
