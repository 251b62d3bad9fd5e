// CRC-32C of memory, page by page, and of pages put together.
//
// Note [Checksums]
// Every checksum here is the common CRC-32C (Castagnoli, reflected, the register starts and ends inverted): the one of
// iSCSI and ext4. A register holds a polynomial over GF(2) with its highest power in the lowest bit. Bytes that follow
// multiply it by x^8 each, modulo the polynomial kModulus, and add theirs. The two inversions cancel in a join, so
// sum(A + B) = sum(A) * x^(8 * length(B)) + sum(B).
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string_view>

#include "loops.hpp"
#include "native.hpp"

// The functions below that use the crc32 instruction; they run only where the processor has it.
#if defined(__x86_64__)
#include <immintrin.h>
#define OUTSIZE_CRC32 [[gnu::target("sse4.2")]]
#define OUTSIZE_FOLDED [[gnu::target("sse4.2,avx512f,vpclmulqdq")]]
#elif defined(__aarch64__) && defined(__linux__) && (!defined(__clang__) || __clang_major__ >= 16)
#include <arm_acle.h>
#include <sys/auxv.h>
#if defined(__clang__)
#define OUTSIZE_CRC32 [[gnu::target("crc")]]
#else
#define OUTSIZE_CRC32 [[gnu::target("+crc")]]
#endif
#endif

namespace outsize {

namespace {

static_assert(std::endian::native == std::endian::little, "registers take the bytes of a word from the lowest up");

using Byte = unsigned char;

constexpr std::uint32_t kModulus = 0x82f63b78;

// One register waits for its last result; several pages side by side keep the processor busy.
constexpr std::size_t kStreams = 4;

// A page of the disk's block size ends too soon for the processor's own prefetching: this far ahead lie the next ones.
// Into the second-level cache: in the first, they would take the places of those in use.
constexpr std::size_t kFetchAhead = kStreams * kBlockBytes;
constexpr std::size_t kLine = 64;

// ------------------------------------------------------------------------------------------------------ registers

constexpr std::uint32_t times_x(std::uint32_t value) { return value >> 1 ^ (value & 1 ? kModulus : 0); }

constexpr std::uint32_t product(std::uint32_t a, std::uint32_t b) {
    std::uint32_t sum = 0;
    for (std::uint32_t power = 1u << 31; power != 0; power >>= 1) {
        if (a & power) sum ^= b;
        b = times_x(b);
    }
    return sum;
}

// kSquares[k] = x^(8 * 2^k)
constexpr std::array<std::uint32_t, 64> kSquares = [] {
    std::array<std::uint32_t, 64> squares{1u << 23};
    for (std::size_t k = 1; k < squares.size(); ++k) squares[k] = product(squares[k - 1], squares[k - 1]);
    return squares;
}();

// x^(8 * nbytes)
constexpr std::uint32_t power(std::size_t nbytes) {
    std::uint32_t value = 1u << 31;
    for (std::size_t k = 0; nbytes != 0; ++k, nbytes >>= 1)
        if (nbytes & 1) value = product(value, kSquares[k]);
    return value;
}

using Table = std::array<std::uint32_t, 256>;

// kAfter[k][byte]: what a byte at the register's lowest place becomes after k + 1 bytes.
constexpr std::array<Table, 8> kAfter = [] {
    std::array<Table, 8> tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t value = byte;
        for (Table& table : tables) {
            for (int bit = 0; bit < 8; ++bit) value = times_x(value);
            table[byte] = value;
        }
    }
    return tables;
}();

std::uint32_t table_step(std::uint32_t crc, Byte byte) { return crc >> 8 ^ kAfter[0][(crc ^ byte) & 0xff]; }

std::uint32_t table_step(std::uint32_t crc, std::uint64_t word) {
    word ^= crc;
    std::uint32_t next = 0;
    for (std::size_t k = 0; k < 8; ++k) next ^= kAfter[7 - k][word >> (8 * k) & 0xff];
    return next;
}

std::uint64_t word_at(const Byte* address) {
    std::uint64_t word;
    std::memcpy(&word, address, sizeof(word));
    return word;
}

// ---------------------------------------------------------------------------------------------------------- pages

using Sums = void (*)(const Byte* pages, std::size_t page_bytes, std::uint32_t* sums);

struct Method {
    Sums one;      // page, of any length
    Sums streams;  // kStreams pages, one after another
};

void table_one(const Byte* page, std::size_t page_bytes, std::uint32_t* sum) {
    std::uint32_t crc = ~0u;
    std::size_t at = 0;
    for (; at + 8 <= page_bytes; at += 8) crc = table_step(crc, word_at(page + at));
    for (; at < page_bytes; ++at) crc = table_step(crc, page[at]);
    *sum = ~crc;
}

void table_streams(const Byte* pages, std::size_t page_bytes, std::uint32_t* sums) {
    for (std::size_t k = 0; k < kStreams; ++k) table_one(pages + k * page_bytes, page_bytes, sums + k);
}

constexpr Method kTables{table_one, table_streams};

#if defined(OUTSIZE_CRC32)

#if defined(__x86_64__)
using Register = std::uint64_t;  // as the instruction has it: no conversion between two steps
bool has_instruction() { return __builtin_cpu_supports("sse4.2"); }
OUTSIZE_CRC32 inline Register step(Register crc, std::uint64_t word) { return _mm_crc32_u64(crc, word); }
OUTSIZE_CRC32 inline Register step(Register crc, Byte byte) { return _mm_crc32_u8(static_cast<unsigned>(crc), byte); }
#else
using Register = std::uint32_t;
bool has_instruction() { return getauxval(AT_HWCAP) & HWCAP_CRC32; }
OUTSIZE_CRC32 inline Register step(Register crc, std::uint64_t word) { return __crc32cd(crc, word); }
OUTSIZE_CRC32 inline Register step(Register crc, Byte byte) { return __crc32cb(crc, byte); }
#endif

inline void fetch(const Byte* address) { __builtin_prefetch(address, 0, 2); }

// The sums of kCount pages side by side, each from its byte `at` on with what its register holds there.
template <std::size_t kCount>
OUTSIZE_CRC32 inline void finish(const Byte* pages, std::size_t page_bytes, std::size_t at, Register (&crc)[kCount],
                                 std::uint32_t* sums) {
    while (at + kLine <= page_bytes) {
        for (std::size_t k = 0; k < kCount; ++k) fetch(pages + k * page_bytes + at + kFetchAhead);
        for (const std::size_t end = at + kLine; at < end; at += 8)
            for (std::size_t k = 0; k < kCount; ++k) crc[k] = step(crc[k], word_at(pages + k * page_bytes + at));
    }
    for (; at + 8 <= page_bytes; at += 8)
        for (std::size_t k = 0; k < kCount; ++k) crc[k] = step(crc[k], word_at(pages + k * page_bytes + at));
    for (; at < page_bytes; ++at)
        for (std::size_t k = 0; k < kCount; ++k) crc[k] = step(crc[k], pages[k * page_bytes + at]);
    for (std::size_t k = 0; k < kCount; ++k) sums[k] = ~static_cast<std::uint32_t>(crc[k]);
}

template <std::size_t kCount>
OUTSIZE_CRC32 void instruction_sums(const Byte* pages, std::size_t page_bytes, std::uint32_t* sums) {
    Register crc[kCount];
    for (Register& each : crc) each = ~0u;
    finish(pages, page_bytes, 0, crc, sums);
}

constexpr Method kInstruction{instruction_sums<1>, instruction_sums<kStreams>};

#else

bool has_instruction() { return false; }
constexpr Method kInstruction = kTables;

#endif

#if defined(OUTSIZE_FOLDED)

// A vector of polynomials in 128-bit lanes is moved past `kBytes` of message, modulo kModulus: the half of higher
// powers times x^(8 * kBytes + 32), the other times x^(8 * kBytes - 32). Each product of two reflected halves is one
// place low. (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009.)
template <std::size_t kBytes>
OUTSIZE_FOLDED inline __m512i past(__m512i value) {
    constexpr auto kFirst = static_cast<long long>(std::uint64_t{power(kBytes + 4)} << 1);
    constexpr auto kSecond = static_cast<long long>(std::uint64_t{power(kBytes - 4)} << 1);
    const __m512i factors = _mm512_set4_epi64(kSecond, kFirst, kSecond, kFirst);
    return _mm512_xor_si512(_mm512_clmulepi64_epi128(value, factors, 0x00),
                            _mm512_clmulepi64_epi128(value, factors, 0x11));
}

OUTSIZE_FOLDED inline __m512i line_at(const Byte* address) { return _mm512_loadu_si512(address); }

// kCount pages side by side, 64 bytes of each at a time.
template <std::size_t kCount>
OUTSIZE_FOLDED void folded_sums(const Byte* pages, std::size_t page_bytes, std::uint32_t* sums) {
    if (page_bytes < kLine) return instruction_sums<kCount>(pages, page_bytes, sums);
    const __m512i start = _mm512_zextsi128_si512(_mm_cvtsi32_si128(-1));  // of a register
    __m512i lines[kCount];
    for (std::size_t k = 0; k < kCount; ++k) lines[k] = _mm512_xor_si512(line_at(pages + k * page_bytes), start);
    std::size_t at = kLine;
    for (; at + kLine <= page_bytes; at += kLine)
        for (std::size_t k = 0; k < kCount; ++k) {
            fetch(pages + k * page_bytes + at + kFetchAhead);
            lines[k] = _mm512_xor_si512(past<kLine>(lines[k]), line_at(pages + k * page_bytes + at));
        }
    Register crc[kCount]{};
    for (std::size_t word = 0; word < kLine; word += 8)
        for (std::size_t k = 0; k < kCount; ++k)
            crc[k] = step(crc[k], word_at(reinterpret_cast<const Byte*>(&lines[k]) + word));
    finish(pages, page_bytes, at, crc, sums);
}

bool can_fold() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq"); }
constexpr Method kFolded{folded_sums<1>, folded_sums<kStreams>};

#else

bool can_fold() { return false; }
constexpr Method kFolded = kTables;

#endif

// The names of the loops' instruction sets choose here too, so that tests reach all three.
const Method& method() {
    static const bool has = has_instruction(), folds = has && can_fold();
    const std::string_view name = loops().name;
    if (!has || name == "portable") return kTables;
    return folds && name == "avx512" ? kFolded : kInstruction;
}

// ---------------------------------------------------------------------------------------------------------- joins

// Multiplication by one power of x, as a table for each byte of the other factor.
class Shift {
  public:
    explicit Shift(std::size_t nbytes) {
        std::uint32_t factor = power(nbytes);  // of the highest bit, which is x^0
        for (std::uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
            const auto at = static_cast<std::size_t>(std::countr_zero(bit));
            tables_[at / 8][std::size_t{1} << at % 8] = factor;
            factor = times_x(factor);
        }
        for (Table& table : tables_)
            for (std::size_t byte = 1; byte < 256; ++byte)
                table[byte] = table[byte & (byte - 1)] ^ table[byte & (~byte + 1)];
    }

    std::uint32_t operator()(std::uint32_t sum) const {
        return tables_[0][sum & 0xff] ^ tables_[1][sum >> 8 & 0xff] ^ tables_[2][sum >> 16 & 0xff] ^
               tables_[3][sum >> 24];
    }

  private:
    std::array<Table, 4> tables_{};
};

}  // namespace

void page_sums(const void* memory, std::size_t nbytes, std::size_t page_bytes, std::uint32_t* sums) {
    const Method& use = method();
    const auto* at = static_cast<const Byte*>(memory);
    for (; nbytes / kStreams >= page_bytes; nbytes -= kStreams * page_bytes) {
        use.streams(at, page_bytes, sums);
        at += kStreams * page_bytes;
        sums += kStreams;
    }
    for (std::size_t here; nbytes > 0; nbytes -= here) {
        here = std::min(page_bytes, nbytes);
        use.one(at, here, sums++);
        at += here;
    }
}

void join_sums(const std::uint32_t* sums, std::size_t count, std::size_t page_bytes, std::size_t last_bytes,
               std::size_t group, std::uint32_t* out) {
    if (count == 0) return;
    const Shift page(page_bytes);
    for (std::size_t first = 0, end; first < count; first = end) {
        end = first + std::min(group, count - first);
        std::uint32_t joined = 0;  // the sum of no bytes
        for (std::size_t k = first; k < std::min(end, count - 1); ++k) joined = page(joined) ^ sums[k];
        if (end == count) joined = product(joined, power(last_bytes)) ^ sums[count - 1];
        *out++ = joined;
    }
}

}  // namespace outsize
