// Which instruction set is in use, and the kernels that need nothing but its loops.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "loops.hpp"
#include "native.hpp"

namespace outsize {

namespace {

// The sets that this processor has, the widest last.
const std::vector<const Loops*>& sets() {
    static const std::vector<const Loops*> found = [] {
        std::vector<const Loops*> all{&kBaselineLoops};
#if defined(__x86_64__)
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
            all.push_back(&kAvx2Loops);
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
            all.push_back(&kAvx512Loops);
#endif
        return all;
    }();
    return found;
}

std::atomic<const Loops*>& chosen() {
    static std::atomic<const Loops*> set{sets().back()};
    return set;
}

// A sum runs over parts of one size, whatever the number of threads; the parts are added in order.
constexpr std::size_t kNormPart = std::size_t{1} << 16;

}  // namespace

const Loops& loops() { return *chosen().load(std::memory_order_relaxed); }

std::string instruction_set() { return loops().name; }

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const Loops* set : sets()) names.emplace_back(set->name);
    return names;
}

void use_instruction_set(const std::string& name) {
    for (const Loops* set : sets()) {
        if (set->name == name) return chosen().store(set);
    }
    throw std::invalid_argument("name is '" + name + "', which is no instruction set of this processor");
}

// Calls work(first, count) for parts of [0, size) that begin at multiples of kBlock, on so many threads at most.
template <class Work>
static void in_blocks(std::size_t size, int threads, const Work& work) {
    constexpr std::size_t kBlock = 1 << 16;
    const std::size_t blocks = (size + kBlock - 1) / kBlock;
    const std::size_t parts = std::clamp<std::size_t>(blocks, 1, static_cast<std::size_t>(threads));
    run_parts(static_cast<int>(parts), [&](int part) {
        const std::size_t first = blocks * static_cast<std::size_t>(part) / parts * kBlock;
        const std::size_t end = std::min(blocks * (static_cast<std::size_t>(part) + 1) / parts * kBlock, size);
        if (first < end) work(first, end - first);
    });
}

double squared_norm(const void* values, DType dtype, std::size_t numel, int threads) {
    const auto loop = loops().squared_norm[static_cast<std::size_t>(dtype)];
    const std::size_t itemsize = dtype == DType::kFloat32 ? 4 : 2;
    std::vector<double> sums((numel + kNormPart - 1) / kNormPart);
    const std::size_t parts = std::clamp<std::size_t>(sums.size(), 1, static_cast<std::size_t>(threads));
    run_parts(static_cast<int>(parts), [&](int part) {
        const std::size_t end = sums.size() * (static_cast<std::size_t>(part) + 1) / parts;
        for (std::size_t k = sums.size() * static_cast<std::size_t>(part) / parts; k < end; ++k) {
            const std::size_t at = k * kNormPart;
            sums[k] = loop(static_cast<const char*>(values) + at * itemsize, std::min(kNormPart, numel - at));
        }
    });
    double total = 0;
    for (const double sum : sums) total += sum;
    return total;
}

void accumulate(float* destination, const void* source, DType dtype, std::size_t numel, float scale, int threads) {
    const auto loop = loops().accumulate[static_cast<std::size_t>(dtype)];
    const std::size_t itemsize = dtype == DType::kFloat32 ? 4 : 2;
    in_blocks(numel, threads, [&](std::size_t first, std::size_t count) {
        loop(destination + first, static_cast<const char*>(source) + first * itemsize, count, scale);
    });
}

void copy(void* destination, const void* source, std::size_t nbytes, int threads) {
    in_blocks(nbytes, threads, [&](std::size_t first, std::size_t count) {
        std::memcpy(static_cast<char*>(destination) + first, static_cast<const char*>(source) + first, count);
    });
}

void split_master(const float* master, std::uint16_t* bf16, std::int16_t* remainder, std::size_t numel) {
    loops().split_master(master, bf16, remainder, numel);
}

void join_master(const std::uint16_t* bf16, const std::int16_t* remainder, float* master, std::size_t numel) {
    loops().join_master(bf16, remainder, master, numel);
}

void encode(const float* values, void* codes, float* scales, std::size_t numel, bool root) {
    if (root)
        loops().encode_root(values, static_cast<std::uint8_t*>(codes), scales, numel);
    else
        loops().encode_signed(values, static_cast<std::int8_t*>(codes), scales, numel);
}

void decode(const void* codes, const float* scales, float* values, std::size_t numel, bool root) {
    if (root)
        loops().decode_root(static_cast<const std::uint8_t*>(codes), scales, values, numel);
    else
        loops().decode_signed(static_cast<const std::int8_t*>(codes), scales, values, numel);
}

}  // namespace outsize
