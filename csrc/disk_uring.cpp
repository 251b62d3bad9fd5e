// A queue on io_uring, through the raw system calls. One thread owns the ring: it submits and reaps.
//
// Note [One thread owns the ring]
// The kernel runs part of a request's completion in the thread that submitted it, and cancels the requests of a thread
// that exits. Callers are arbitrary (short-lived, busy, blocked) threads, so none of them submits: they append to a
// list and ring an eventfd on which the ring always has one read pending. It also makes every barrier one between this
// thread and the kernel:
//   - submission tail, store-release: the kernel must see the entries before it sees that they are there;
//   - submission head, load-acquire: the kernel has finished reading an entry before it is filled anew;
//   - completion tail, load-acquire: entries are read only after the kernel has said that they are there;
//   - completion head, store-release: the kernel may overwrite an entry only after it has been read.
#include <cerrno>
#include <system_error>

#include "native.hpp"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)

#include <linux/io_uring.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <thread>

namespace outsize {

namespace {

std::system_error last_error(const char* what) { return {errno, std::generic_category(), what}; }

class FileDescriptor {
  public:
    explicit FileDescriptor(int fd) : fd_(fd) {}
    ~FileDescriptor() {
        if (fd_ >= 0) ::close(fd_);
    }
    FileDescriptor(const FileDescriptor&) = delete;
    FileDescriptor& operator=(const FileDescriptor&) = delete;
    int get() const { return fd_; }

  private:
    int fd_;
};

class Mapping {
  public:
    Mapping(int fd, std::size_t nbytes, off_t offset)
        : nbytes_(nbytes),
          memory_(::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset)) {
        if (memory_ == MAP_FAILED) throw last_error("mmap of an io_uring ring");
    }
    ~Mapping() { ::munmap(memory_, nbytes_); }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    template <class T>
    T* at(std::size_t offset) const {
        return reinterpret_cast<T*>(static_cast<char*>(memory_) + offset);
    }

  private:
    std::size_t nbytes_;
    void* memory_;
};

// The two rings. Used by one thread at a time; see Note [One thread owns the ring].
class Ring {
  public:
    explicit Ring(unsigned entries)
        : fd_(static_cast<int>(::syscall(__NR_io_uring_setup, entries, &params_))),
          submissions_(checked_fd(), params_.sq_off.array + params_.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING),
          completions_(fd_.get(), params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING),
          entries_(fd_.get(), params_.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES) {
        tail_ = load(submission(params_.sq_off.tail));
    }

    // A cleared entry that the next enter() submits. There must be room: at most `entries` are unsubmitted.
    io_uring_sqe& prepare() {
        const unsigned slot = tail_++ & *submission(params_.sq_off.ring_mask);
        io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[slot];
        entry = {};
        submission(params_.sq_off.array)[slot] = slot;
        return entry;
    }

    unsigned unsubmitted() const {
        return tail_ - std::atomic_ref(*submission(params_.sq_off.head)).load(std::memory_order_acquire);
    }

    // Submits what is prepared and waits for `completions` entries. Returns 0 or an errno; submission may be partial.
    int enter(unsigned completions) {
        std::atomic_ref(*submission(params_.sq_off.tail)).store(tail_, std::memory_order_release);
        const long result = ::syscall(__NR_io_uring_enter, fd_.get(), unsubmitted(), completions,
                                      completions > 0 ? IORING_ENTER_GETEVENTS : 0, nullptr, 0);
        return result < 0 ? errno : 0;
    }

    // Takes back what is prepared and not submitted, last first.
    void take_back_last() {
        --tail_;
        std::atomic_ref(*submission(params_.sq_off.tail)).store(tail_, std::memory_order_release);
    }
    std::uint64_t last_user_data() const {
        return entries_.at<io_uring_sqe>(0)[(tail_ - 1) & *submission(params_.sq_off.ring_mask)].user_data;
    }

    // Calls visit(user_data, result) for every completion that is there.
    template <class Visit>
    void reap(Visit visit) {
        unsigned head = load(completion(params_.cq_off.head));
        const unsigned tail = std::atomic_ref(*completion(params_.cq_off.tail)).load(std::memory_order_acquire);
        const unsigned mask = *completion(params_.cq_off.ring_mask);
        for (; head != tail; ++head) {
            const io_uring_cqe entry = completions_.at<io_uring_cqe>(params_.cq_off.cqes)[head & mask];
            std::atomic_ref(*completion(params_.cq_off.head)).store(head + 1, std::memory_order_release);
            visit(entry.user_data, entry.res);
        }
    }

  private:
    int checked_fd() const {
        if (fd_.get() < 0) throw last_error("io_uring_setup");
        return fd_.get();
    }
    unsigned* submission(std::size_t offset) const { return submissions_.at<unsigned>(offset); }
    unsigned* completion(std::size_t offset) const { return completions_.at<unsigned>(offset); }
    static unsigned load(unsigned* word) { return std::atomic_ref(*word).load(std::memory_order_relaxed); }

    io_uring_params params_{};  // before fd_: the kernel fills it in
    FileDescriptor fd_;
    Mapping submissions_;
    Mapping completions_;
    Mapping entries_;
    unsigned tail_ = 0;  // our side of the submission ring
};

constexpr std::uint64_t kDoorbell = ~std::uint64_t{0};

class UringQueue final : public PieceQueue {
  public:
    UringQueue(PieceListener& listener, unsigned depth)
        : listener_(listener), ring_(depth + 1), doorbell_(::eventfd(0, EFD_CLOEXEC)), slots_(depth), bounces_(depth) {
        if (doorbell_.get() < 0) throw last_error("eventfd");
        for (unsigned slot = 0; slot < depth; ++slot) free_slots_.push_back(slot);
        thread_ = std::thread([this] { serve(); });
    }

    ~UringQueue() override {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        ring_doorbell();
        thread_.join();
    }

    void push(std::vector<Piece> pieces) override {
        bool was_empty;
        {
            const std::lock_guard lock(mutex_);
            was_empty = arrived_.empty();
            arrived_.insert(arrived_.end(), pieces.begin(), pieces.end());
        }
        if (was_empty) ring_doorbell();
    }

  private:
    // ------------------------------------------------------------------------------------------- any thread
    void ring_doorbell() {
        const std::uint64_t one = 1;
        // Fails only when the counter is at its maximum, and then the bell rings already.
        while (::write(doorbell_.get(), &one, sizeof one) == -1 && errno == EINTR) {
        }
    }

    // -------------------------------------------------------------------------------------- the ring's thread
    void serve() {
        while (true) {
            const bool stopping = take_arrived();
            if (!stopping && !doorbell_pending_) listen_to_doorbell();
            while (!waiting_.empty() && !free_slots_.empty()) submit_next();
            if (stopping && waiting_.empty() && in_flight() == 0 && !doorbell_pending_) return;
            const int error = ring_.enter(1);
            if (error != 0) recover(error);
            ring_.reap([this](std::uint64_t user_data, std::int32_t result) { on_completion(user_data, result); });
        }
    }

    std::size_t in_flight() const { return slots_.size() - free_slots_.size(); }

    void listen_to_doorbell() {
        io_uring_sqe& entry = ring_.prepare();
        entry.opcode = IORING_OP_READ;
        entry.fd = doorbell_.get();
        entry.addr = reinterpret_cast<std::uintptr_t>(&rings_);
        entry.len = sizeof rings_;
        entry.user_data = kDoorbell;
        doorbell_pending_ = true;
    }

    bool take_arrived() {
        const std::lock_guard lock(mutex_);
        waiting_.insert(waiting_.end(), arrived_.begin(), arrived_.end());
        arrived_.clear();
        return stopping_;
    }

    void submit_next() {
        Piece piece = waiting_.front();
        waiting_.pop_front();
        listener_.on_attempt();
        if (piece.injected_error != 0) {
            judge(piece, 0);
            return;
        }
        const unsigned slot = free_slots_.back();
        free_slots_.pop_back();
        piece.bounce_in(bounces_, slot);
        slots_[slot] = piece;
        io_uring_sqe& entry = ring_.prepare();
        entry.opcode = piece.operation == Operation::kRead ? IORING_OP_READ : IORING_OP_WRITE;
        entry.fd = piece.fd;
        entry.off = piece.attempt_offset();
        entry.addr = reinterpret_cast<std::uintptr_t>(piece.attempt_address());
        entry.len = static_cast<std::uint32_t>(piece.attempt_nbytes());
        entry.user_data = slot;
    }

    void on_completion(std::uint64_t user_data, std::int64_t result) {
        if (user_data == kDoorbell) {
            doorbell_pending_ = false;
            return;
        }
        free_slots_.push_back(static_cast<unsigned>(user_data));
        Piece piece = slots_[user_data];
        judge(piece, result);
    }

    void judge(Piece& piece, std::int64_t result) {
        if (piece.advance(result))
            listener_.on_finished(piece);
        else
            waiting_.push_front(piece);
    }

    // enter() failed as a whole. What the kernel accepted will still complete; what it did not accept fails here.
    void recover(int error) {
        if (error == EINTR) return;
        if (error == EAGAIN || error == EBUSY) {
            // The kernel is short of memory or of completion entries: both pass.
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            return;
        }
        while (ring_.unsubmitted() > 0) {
            const std::uint64_t user_data = ring_.last_user_data();
            ring_.take_back_last();
            on_completion(user_data, -error);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }

    PieceListener& listener_;
    Ring ring_;
    FileDescriptor doorbell_;
    std::uint64_t rings_ = 0;  // where the kernel puts the doorbell's count
    bool doorbell_pending_ = false;
    std::vector<Piece> slots_;  // in flight, by user_data
    Bounces bounces_;           // one a slot
    std::vector<unsigned> free_slots_;
    std::deque<Piece> waiting_;

    std::mutex mutex_;  // guards the two below
    std::vector<Piece> arrived_;
    bool stopping_ = false;

    std::thread thread_;
};

// Note [A bounded probe]
// Once in some hundred processes a kernel was seen to never complete a transfer of the probe. So nobody waits in the
// kernel for it: who asks looks for a second, and what has not come by then does not work. `value` may be written
// later.

constexpr auto kProbeTime = std::chrono::seconds(1);

int transfer_once(Ring& ring, unsigned char opcode, int fd, std::uint64_t& value) {
    io_uring_sqe& entry = ring.prepare();
    entry.opcode = opcode;
    entry.fd = fd;
    entry.addr = reinterpret_cast<std::uintptr_t>(&value);
    entry.len = sizeof value;
    int error = ring.enter(0);
    while (error == EINTR) error = ring.enter(0);
    if (error != 0) return error;
    bool completed = false;
    std::int32_t result = 0;
    const auto until = std::chrono::steady_clock::now() + kProbeTime;
    while (true) {
        ring.reap([&](std::uint64_t, std::int32_t value) {
            completed = true;
            result = value;
        });
        if (completed) break;
        if (std::chrono::steady_clock::now() > until) return ETIME;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    if (result < 0) return -result;
    return result == sizeof value ? 0 : EIO;
}

}  // namespace

std::unique_ptr<PieceQueue> open_uring_queue(PieceListener& listener, unsigned depth) {
    if (const int error = probe_uring()) throw std::system_error(error, std::generic_category(), "io_uring");
    return std::make_unique<UringQueue>(listener, depth);
}

int probe_uring() try {
    Ring ring(2);
    const FileDescriptor counter(::eventfd(0, EFD_CLOEXEC));
    if (counter.get() < 0) return errno;
    static std::uint64_t value;  // see Note [A bounded probe]
    value = 1;
    if (const int error = transfer_once(ring, IORING_OP_WRITE, counter.get(), value)) return error;
    return transfer_once(ring, IORING_OP_READ, counter.get(), value);
} catch (const std::system_error& error) {
    return error.code().value();
}

}  // namespace outsize

#else

namespace outsize {

std::unique_ptr<PieceQueue> open_uring_queue(PieceListener&, unsigned) {
    throw std::system_error(ENOSYS, std::generic_category(), "io_uring");
}

int probe_uring() { return ENOSYS; }

}  // namespace outsize

#endif
