// The optimizers: their scalars, in double and rounded once, and the parts of the memory that each thread updates.
#include <algorithm>
#include <cmath>

#include "loops.hpp"
#include "native.hpp"

namespace outsize {

namespace {

// Parts are whole pages of the smallest element, so that threads share no cache line.
constexpr std::size_t kPartElements = 4096;
// Waking a thread takes about 40 microseconds. Another one updates about this many pages in that time.
constexpr std::size_t kLeastPages = 32;
static_assert(kPartElements % kStateBlock == 0);

// Compact states are decoded, updated and encoded in this many elements at a time, which stay in the first-level cache.
constexpr std::size_t kWindow = 512;
static_assert(kWindow % kStateBlock == 0);

// To negate what was scaled and clamped is to scale by the negative and clamp to the mirrored bounds, bit for bit.
GradScalars grad_scalars(const Arrays& arrays, bool maximize) {
    if (maximize) return {-arrays.grad_scale, -arrays.clamp_max, -arrays.clamp_min};
    return {arrays.grad_scale, arrays.clamp_min, arrays.clamp_max};
}

std::size_t itemsize(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

WeightFormat weight_format(const Arrays& arrays) {
    switch (arrays.param_dtype) {
        case DType::kFloat32:
            return WeightFormat::kFloat32;
        case DType::kBFloat16:
            return WeightFormat::kSplit;
        case DType::kFloat16:
            return WeightFormat::kMaster;
    }
    __builtin_unreachable();
}

// The arrays from element `at` on; of compact states it is their codes.
Span span_at(const Arrays& arrays, std::size_t at, std::size_t numel) {
    const auto place = [at](void* base, std::size_t bytes) -> void* {
        return base == nullptr ? nullptr : static_cast<char*>(base) + at * bytes;
    };
    Span span{.param = place(arrays.param, itemsize(arrays.param_dtype)),
              .master = place(arrays.master, arrays.param_dtype == DType::kFloat16 ? 4 : 2),
              .grad = static_cast<const char*>(arrays.grad) + at * itemsize(arrays.grad_dtype),
              .states = {},
              .numel = numel};
    if (!arrays.compact()) {
        for (std::size_t k = 0; k < arrays.states.size(); ++k)
            span.states[k] = static_cast<float*>(place(arrays.states[k], sizeof(float)));
    }
    return span;
}

// `roots` has a bit for every state that is kept by its root.
template <class Scalars>
void update_compact(const Arrays& arrays, UpdateLoop<Scalars> loop, const Scalars& scalars, unsigned roots,
                    std::size_t begin, std::size_t end) {
    float values[kMostStates][kWindow];
    for (std::size_t at = begin; at < end; at += kWindow) {
        Span span = span_at(arrays, at, std::min(kWindow, end - at));
        const auto codes = [&](std::size_t k) { return static_cast<char*>(arrays.states[k]) + at; };
        const auto scales = [&](std::size_t k) { return arrays.scales[k] + at / kStateBlock; };
        for (std::size_t k = 0; k < arrays.states.size(); ++k) {
            span.states[k] = values[k];
            decode(codes(k), scales(k), values[k], span.numel, roots >> k & 1);
        }
        loop(span, scalars);
        for (std::size_t k = 0; k < arrays.states.size(); ++k)
            encode(values[k], codes(k), scales(k), span.numel, roots >> k & 1);
    }
}

template <class Scalars>
void update(const Arrays& arrays, const UpdateLoops<Scalars>& table, const Scalars& scalars, unsigned roots,
            int threads) {
    const UpdateLoop<Scalars> loop =
        table[static_cast<std::size_t>(weight_format(arrays))][static_cast<std::size_t>(arrays.grad_dtype)];
    const std::size_t pages = (arrays.numel + kPartElements - 1) / kPartElements;
    const std::size_t parts = std::clamp<std::size_t>(pages / kLeastPages, 1, static_cast<std::size_t>(threads));
    run_parts(static_cast<int>(parts), [&](int part) {
        const std::size_t first = pages * static_cast<std::size_t>(part) / parts * kPartElements;
        const std::size_t last = pages * (static_cast<std::size_t>(part) + 1) / parts * kPartElements;
        const std::size_t begin = std::min(first, arrays.numel), end = std::min(last, arrays.numel);
        if (arrays.compact())
            update_compact(arrays, loop, scalars, roots, begin, end);
        else
            loop(span_at(arrays, begin, end - begin), scalars);
    });
}

float rounded(double value) { return static_cast<float>(value); }

}  // namespace

void adam(const Arrays& arrays, const Adam& options, int threads) {
    const auto step = static_cast<double>(options.step);
    const float weight = rounded(1 - options.beta1);
    const bool from_start = std::fabs(weight) < 0.5f;  // as torch's lerp chooses
    const AdamScalars scalars{
        .grad = grad_scalars(arrays, options.maximize),
        .keep = options.decoupled ? rounded(1 - options.lr * options.weight_decay) : 1.0f,
        .coupled = options.decoupled ? 0.0f : rounded(options.weight_decay),
        .lerp_weight = from_start ? weight : weight - 1,
        .lerp_from_start = from_start,
        .beta2 = rounded(options.beta2),
        .one_minus_beta2 = rounded(1 - options.beta2),
        .bias_correction2_sqrt = rounded(std::pow(1 - std::pow(options.beta2, step), 0.5)),
        .eps = rounded(options.eps),
        .minus_step_size = rounded(-(options.lr / (1 - std::pow(options.beta1, step)))),
    };
    update(arrays, loops().adam[options.amsgrad][scalars.coupled != 0], scalars, 0b110, threads);
}

void sgd(const Arrays& arrays, const Sgd& options, int threads) {
    const SgdScalars scalars{
        .grad = grad_scalars(arrays, options.maximize),
        .coupled = rounded(options.weight_decay),
        .momentum = rounded(options.momentum),
        .one_minus_dampening = rounded(1 - options.dampening),
        .nesterov = options.nesterov,
        .first = options.first,
        .minus_lr = rounded(-options.lr),
    };
    update(arrays, options.momentum != 0 ? loops().sgd_momentum : loops().sgd_plain, scalars, 0b0, threads);
}

void adagrad(const Arrays& arrays, const Adagrad& options, int threads) {
    const double lr = options.lr / (1 + (static_cast<double>(options.step) - 1) * options.lr_decay);
    const AdagradScalars scalars{
        .grad = grad_scalars(arrays, options.maximize),
        .coupled = rounded(options.weight_decay),
        .eps = rounded(options.eps),
        .minus_step_size = rounded(-lr),
    };
    update(arrays, loops().adagrad, scalars, 0b1, threads);
}

void lion(const Arrays& arrays, const Lion& options, int threads) {
    const LionScalars scalars{
        .grad = grad_scalars(arrays, options.maximize),
        .keep = rounded(1 - options.lr * options.weight_decay),
        .beta1 = rounded(options.beta1),
        .one_minus_beta1 = rounded(1 - options.beta1),
        .beta2 = rounded(options.beta2),
        .one_minus_beta2 = rounded(1 - options.beta2),
        .minus_lr = rounded(-options.lr),
    };
    update(arrays, loops().lion, scalars, 0b0, threads);
}

}  // namespace outsize
