// The small kernels: norms, accumulation, split masters.
#include "kernels.hpp"

namespace outsize {

namespace {

// Element i goes to lane i % kLanes, the lanes are added in order: one order on every machine.
constexpr std::size_t kLanes = 16;

template <class Format>
OUTSIZE_INLINE void squared_norm_loop(const typename Format::Storage* values, std::size_t numel, double* total) {
    double lanes[kLanes] = {};
    const std::size_t whole = numel / kLanes * kLanes;
    for (std::size_t i = 0; i < whole; i += kLanes) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            const double value = Format::widen(values[i + lane]);
            lanes[lane] += value * value;
        }
    }
    for (std::size_t i = whole; i < numel; ++i) {
        const double value = Format::widen(values[i]);
        lanes[i - whole] += value * value;
    }
    *total = 0;
    for (const double lane : lanes) *total += lane;
}

template <class Format>
OUTSIZE_INLINE void accumulate_loop(float* __restrict destination, const typename Format::Storage* __restrict source,
                                    std::size_t numel, float scale) {
    for (std::size_t i = 0; i < numel; ++i) destination[i] = destination[i] * scale + Format::widen(source[i]);
}

}  // namespace

double squared_norm(const void* values, DType dtype, std::size_t numel) {
    double total = 0;
    with_format(dtype, [&]<class Format>(Format) {
        OUTSIZE_DISPATCH(squared_norm_loop<Format>, static_cast<const typename Format::Storage*>(values), numel,
                         &total);
    });
    return total;
}

void accumulate(float* destination, const void* source, DType dtype, std::size_t numel, float scale) {
    with_format(dtype, [&]<class Format>(Format) {
        OUTSIZE_DISPATCH(accumulate_loop<Format>, destination, static_cast<const typename Format::Storage*>(source),
                         numel, scale);
    });
}

void split_master(const float* master, std::uint16_t* bf16, std::int16_t* remainder, std::size_t numel) {
    OUTSIZE_DISPATCH(split_loop, master, bf16, remainder, numel);
}

void join_master(const std::uint16_t* bf16, const std::int16_t* remainder, float* master, std::size_t numel) {
    OUTSIZE_DISPATCH(join_loop, bf16, remainder, master, numel);
}

}  // namespace outsize
