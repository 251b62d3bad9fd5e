// The native core: moves and updates bytes. It knows neither torch nor (outside bindings.cpp) Python.
//
// Usage:
//     outsize::DiskEngine engine("uring", {});
//     auto ticket = engine.start(outsize::Operation::kRead, fd, offset, memory, nbytes);
//     ...                                  // compute
//     engine.wait(ticket);                 // throws std::system_error; the memory is free to reuse either way
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace outsize {

// ---------------------------------------------------------------------------------------------------------- disk

enum class Operation : std::uint8_t { kRead, kWrite };

// Direct I/O needs file offset, address and length in multiples of the device's block; no device has larger ones.
inline constexpr std::size_t kBlockBytes = 4096;

// Note [Direct reads of any bytes]
// A direct read of bytes that lie otherwise takes the whole blocks around them into memory of the queue (the bounce, of
// as many bytes as one such piece has), and copies what was asked for when it is finished. The page cache takes part in
// nothing: a read through it is twice as slow and costs ten times the processor time. Bounces lie in huge pages: a
// virtual drive takes each page by itself, and gave a third as much into small ones.
inline constexpr std::size_t kBounceBytes = 256 << 10;
inline constexpr std::size_t kHugeBytes = 2 << 20;

// The bounces of a queue, which has them from the first need on. Any thread may ask.
class Bounces {
  public:
    explicit Bounces(std::size_t count) : nbytes_((count * kBounceBytes + kHugeBytes - 1) / kHugeBytes * kHugeBytes) {}

    // The bounce with this number; null where the system has no memory.
    char* at(std::size_t number);

  private:
    struct FreeMemory {
        void operator()(char* memory) const { std::free(memory); }
    };

    std::size_t nbytes_;
    std::mutex mutex_;  // guards memory_
    std::unique_ptr<char, FreeMemory> memory_;
};

// A read found the end of the file before the end of its range. Reported as EIO, in words of its own.
constexpr int kFileEnds = -1;

// One piece of a ticket's range, and how far it has come. A queue performs attempts; `advance` judges their results.
struct Piece {
    std::uint64_t ticket = 0;
    int fd = -1;
    Operation operation = Operation::kRead;
    std::uint64_t offset = 0;  // of the whole piece in the file
    char* address = nullptr;   // of the whole piece in memory
    std::size_t nbytes = 0;    // of the whole piece
    std::size_t needed = 0;    // bytes after which it is finished: a file may end inside the last block
    char* target = nullptr;    // where bytes `skip` to `needed` are copied, if `address` is a bounce
    std::size_t skip = 0;
    std::size_t resume = 0;   // where the next attempt starts, relative to `offset`
    std::size_t reached = 0;  // bytes known to be transferred
    int futile = 0;           // attempts in a row that reached nothing new
    int error = 0;            // the errno that ended the piece, or kFileEnds

    // Set by tests: what happens to the next attempt.
    int injected_error = 0;
    std::int64_t injected_short = -1;

    // The next attempt.
    std::uint64_t attempt_offset() const { return offset + resume; }
    char* attempt_address() const { return address + resume; }
    std::size_t attempt_nbytes() const;

    // Before each attempt: a piece that needs one gets the bounce with this number, and begins anew.
    void bounce_in(Bounces& bounces, std::size_t number);

    // Takes an attempt's result (bytes, or -errno). True when the piece is finished, with `error` set if it failed.
    bool advance(std::int64_t result);

    // Bytes that were asked for and have come or gone.
    std::size_t moved() const { return std::min(reached, needed) - std::min(reached, skip); }

  private:
    bool fail(int code);
};

// What a queue reports to; callable from any thread.
class PieceListener {
  public:
    virtual void on_attempt() = 0;
    virtual void on_finished(const Piece& piece) = 0;

  protected:
    ~PieceListener() = default;
};

// Performs pieces, in the order given, several at a time. Unbounded; the destructor finishes what was pushed.
class PieceQueue {
  public:
    virtual ~PieceQueue() = default;
    virtual void push(std::vector<Piece> pieces) = 0;
};

std::unique_ptr<PieceQueue> open_threads_queue(PieceListener& listener, int threads);

// Throws std::system_error when io_uring cannot be set up.
std::unique_ptr<PieceQueue> open_uring_queue(PieceListener& listener, unsigned depth);

// 0 if io_uring reads and writes here, else the errno.
int probe_uring();

struct DiskOptions {
    unsigned depth = 32;                  // requests in flight (uring)
    int threads = 8;                      // requests in flight (threads)
    std::size_t request_bytes = 4 << 20;  // a ticket's range is cut into pieces of this size
};

// Asynchronous reads and writes, from any number of threads. Tickets count up from 1.
class DiskEngine final : private PieceListener {
  public:
    DiskEngine(std::string backend, DiskOptions options);
    ~DiskEngine();
    DiskEngine(const DiskEngine&) = delete;
    DiskEngine& operator=(const DiskEngine&) = delete;

    // The memory belongs to the engine until the ticket is finished. A read may begin and end anywhere; a write to a
    // direct file has whole blocks.
    std::uint64_t start(Operation operation, int fd, std::uint64_t offset, char* address, std::size_t nbytes);

    // The pages of these numbers, in order, as one ticket; they lie one after the other at `address`. Neighbours are
    // one piece.
    std::uint64_t start_pages(Operation operation, int fd, const std::int64_t* pages, std::size_t count, char* address);

    // Blocks until every piece of the ticket has finished, then throws its first error, once.
    void wait(std::uint64_t ticket);
    bool done(std::uint64_t ticket);

    // Finishes what is in flight and joins the threads; safe to repeat. In a forked child it only lets go.
    void close();

    // Tests: the nth next piece of this operation fails with `error`, or at first moves `short_bytes` only.
    void inject(Operation operation, std::uint64_t nth, int error, std::int64_t short_bytes);

    const std::string& backend() const { return backend_; }
    std::uint64_t bytes_read() const { return bytes_read_; }
    std::uint64_t bytes_written() const { return bytes_written_; }
    std::uint64_t requests() const { return requests_; }

  private:
    // A ticket that is not in the table has finished, and its error, if any, was reported.
    struct Ticket {
        std::size_t pieces_left;
        int error;
        std::uint64_t error_offset;  // "first" means lowest in the file: independent of completion order
    };
    struct Injection {
        Operation operation;
        std::uint64_t countdown;
        int error;
        std::int64_t short_bytes;
    };

    void cut(std::vector<Piece>& pieces, Piece whole) const;
    void cut_into_bounces(std::vector<Piece>& pieces, const Piece& whole) const;
    std::uint64_t submit(std::vector<Piece> pieces);
    void on_attempt() override { requests_.fetch_add(1, std::memory_order_relaxed); }
    void on_finished(const Piece& piece) override;
    void expect_own_process() const;
    void apply_injections(Piece& piece);
    void expect_known(std::uint64_t ticket) const;

    const std::string backend_;
    const DiskOptions options_;
    const int process_;
    std::atomic<std::uint64_t> bytes_read_{0};
    std::atomic<std::uint64_t> bytes_written_{0};
    std::atomic<std::uint64_t> requests_{0};

    std::mutex mutex_;  // guards everything below
    std::unique_ptr<std::condition_variable> finished_ = std::make_unique<std::condition_variable>();
    std::uint64_t next_ticket_ = 1;
    std::unordered_map<std::uint64_t, Ticket> tickets_;
    std::vector<Injection> injections_;
    std::shared_ptr<PieceQueue> queue_;  // null once closed
};

// ------------------------------------------------------------------------------------------------------- kernels

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Calls body(part) for every part in [0, parts) and returns when all are done: part 0 on this thread, part i always on
// thread i of the pool, or of the team of torch. The threads persist; the body must not throw.
void run_parts(int parts, const std::function<void(int)>& body);

// Elements that share one scale in a compact state; see Note [8-bit states] in loops_impl.hpp.
inline constexpr std::size_t kStateBlock = 64;

// The memory that an update works on; all arrays have `numel` elements and do not overlap.
struct Arrays {
    void* param;  // fp32; bf16 with its int16 remainder as master; fp16, only written, with its fp32 master
    DType param_dtype;
    void* master;  // null for fp32
    const void* grad;
    DType grad_dtype;
    std::vector<void*> states;   // fp32, or codes of one byte when there are scales
    std::vector<float*> scales;  // one fp32 for each block of kStateBlock elements of each state, or none
    std::size_t numel;
    float grad_scale = 1.0f;  // the gradient is scaled, then clamped, then negated when maximizing
    float clamp_min, clamp_max;

    bool compact() const { return !scales.empty(); }
};

// Steps count from 1. Each function names the states that `arrays` must have, in order; nothing is checked here.

struct Adam {  // exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq
    double lr, beta1, beta2, eps, weight_decay;
    bool decoupled, maximize, amsgrad;
    std::int64_t step;
};

struct Sgd {  // momentum_buffer if momentum is not 0
    double lr, momentum, dampening, weight_decay;
    bool nesterov, maximize;
    bool first;  // there is no momentum yet: it starts as the gradient
};

struct Adagrad {  // sum
    double lr, lr_decay, eps, weight_decay;
    bool maximize;
    std::int64_t step;
};

struct Lion {  // exp_avg; decay is decoupled
    double lr, beta1, beta2, weight_decay;
    bool maximize;
};

void adam(const Arrays& arrays, const Adam& options, int threads);
void sgd(const Arrays& arrays, const Sgd& options, int threads);
void adagrad(const Arrays& arrays, const Adagrad& options, int threads);
void lion(const Arrays& arrays, const Lion& options, int threads);

// The instruction set in use, those that the processor has (the widest last), and a choice for tests: it throws
// std::invalid_argument if the processor lacks it. All give the same bits.
std::string instruction_set();
std::vector<std::string> instruction_sets();
void use_instruction_set(const std::string& name);

// Sum of squares in double, in one fixed order.
double squared_norm(const void* values, DType dtype, std::size_t numel, int threads);

// destination = destination * scale + source
void accumulate(float* destination, const void* source, DType dtype, std::size_t numel, float scale, int threads);

// Copies bytes; the two ranges must not overlap.
void copy(void* destination, const void* source, std::size_t nbytes, int threads);

// See Note [Split master] in simd.hpp.
void split_master(const float* master, std::uint16_t* bf16, std::int16_t* remainder, std::size_t numel);
void join_master(const std::uint16_t* bf16, const std::int16_t* remainder, float* master, std::size_t numel);

// To and from a compact state: int8 codes of a signed array, uint8 codes of the roots of an array of squares.
void encode(const float* values, void* codes, float* scales, std::size_t numel, bool root);
void decode(const void* codes, const float* scales, float* values, std::size_t numel, bool root);

// ----------------------------------------------------------------------------------------------------- checksums

// CRC-32C, by pages of `page_bytes`, the last of which may be shorter. See Note [Checksums] in checksum.cpp.
void page_sums(const void* memory, std::size_t nbytes, std::size_t page_bytes, std::uint32_t* sums);

// The sums of each `group` pages in a row as one range, from the sums of the `count` pages; the very last page has
// `last_bytes`.
void join_sums(const std::uint32_t* sums, std::size_t count, std::size_t page_bytes, std::size_t last_bytes,
               std::size_t group, std::uint32_t* out);

}  // namespace outsize
