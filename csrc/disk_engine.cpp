// Tickets, and the rules by which an attempt's result is judged. How attempts are made: disk_uring.cpp,
// disk_threads.cpp.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "native.hpp"

namespace outsize {

namespace {

bool is_direct(int fd) {
    const int flags = ::fcntl(fd, F_GETFL);
    return flags != -1 && (flags & O_DIRECT) != 0;
}

bool in_blocks(const Piece& piece) {
    return (piece.offset | reinterpret_cast<std::uintptr_t>(piece.address) | piece.nbytes) % kBlockBytes == 0;
}

// Where the limit of the size of files ends inside a block, a direct write is called invalid, or stops there.
bool ends_past_limit(const Piece& piece) {
    rlimit limit;
    return piece.operation == Operation::kWrite && ::getrlimit(RLIMIT_FSIZE, &limit) == 0 &&
           piece.offset + piece.nbytes > limit.rlim_cur;
}

// Whether the file has less than a read asks for.
bool ends_early(const Piece& piece) {
    struct stat found;
    return piece.operation == Operation::kRead && ::fstat(piece.fd, &found) == 0 &&
           static_cast<std::size_t>(found.st_size) < piece.offset + piece.needed;
}

constexpr std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

// A direct transfer that keeps stopping inside one block has met the end of the file, or a broken device.
constexpr int kFutileAttempts = 3;

}  // namespace

std::size_t Piece::attempt_nbytes() const {
    const std::size_t left = nbytes - resume;
    if (injected_short < 0) return left;
    const auto wanted = static_cast<std::size_t>(injected_short);
    return std::min(left, is_direct(fd) ? round_up(wanted, kBlockBytes) : wanted);
}

bool Piece::fail(int code) {
    error = code;
    return true;
}

char* Bounces::at(std::size_t number) {
    const std::lock_guard lock(mutex_);
    if (!memory_) {
        memory_.reset(static_cast<char*>(std::aligned_alloc(kHugeBytes, nbytes_)));
        if (!memory_) return nullptr;
        ::madvise(memory_.get(), nbytes_, MADV_HUGEPAGE);  // a kernel without them refuses, and small ones serve
    }
    return memory_.get() + number * kBounceBytes;
}

void Piece::bounce_in(Bounces& bounces, std::size_t number) {
    if (target == nullptr) return;
    address = bounces.at(number);
    if (address == nullptr) injected_error = ENOMEM;
    resume = 0;
}

bool Piece::advance(std::int64_t result) {
    if (injected_error != 0) return fail(std::exchange(injected_error, 0));
    if (injected_short >= 0) result = std::min(result, std::exchange(injected_short, -1));
    if (result == -EINTR || result == -EAGAIN) return false;
    if (result == -EINVAL && ends_past_limit(*this)) return fail(EFBIG);
    if (result < 0) return fail(static_cast<int>(-result));
    if (result == 0 && operation == Operation::kRead) return fail(kFileEnds);

    const std::size_t now = resume + static_cast<std::size_t>(result);
    futile = now > reached ? 0 : futile + 1;
    reached = std::max(reached, now);
    if (reached >= needed) {
        if (target != nullptr) std::memcpy(target, address + skip, needed - skip);
        return true;
    }
    if (futile == kFutileAttempts && ends_early(*this)) return fail(kFileEnds);
    if (futile == kFutileAttempts) return fail(ends_past_limit(*this) ? EFBIG : EIO);
    // Whole blocks only keep the alignment of the piece's start, whatever that is; redoing a part of one is harmless.
    resume = is_direct(fd) ? reached / kBlockBytes * kBlockBytes : reached;
    return false;
}

DiskEngine::DiskEngine(std::string backend, DiskOptions options)
    : backend_(std::move(backend)), options_(options), process_(::getpid()) {
    if (options.request_bytes == 0 || options.request_bytes % kBlockBytes != 0 || options.request_bytes > (1u << 30))
        throw std::invalid_argument("request_bytes is " + std::to_string(options.request_bytes) +
                                    "; it must be a multiple of 4096, at most 1 GiB");
    if (options.depth < 1 || options.depth > 4096)
        throw std::invalid_argument("depth is " + std::to_string(options.depth) + "; it must be from 1 to 4096");
    if (options.threads < 1 || options.threads > 256)
        throw std::invalid_argument("threads is " + std::to_string(options.threads) + "; it must be from 1 to 256");
    if (backend_ == "uring")
        queue_ = open_uring_queue(*this, options.depth);
    else if (backend_ == "threads")
        queue_ = open_threads_queue(*this, options.threads);
    else
        throw std::invalid_argument("backend is '" + backend_ + "'; it must be 'uring' or 'threads'");
}

DiskEngine::~DiskEngine() { close(); }

void DiskEngine::expect_own_process() const {
    if (::getpid() != process_)
        throw std::runtime_error("this disk engine belongs to process " + std::to_string(process_) +
                                 "; open another one after a fork");
}

void DiskEngine::expect_known(std::uint64_t ticket) const {
    if (ticket == 0 || ticket >= next_ticket_)
        throw std::invalid_argument("ticket " + std::to_string(ticket) + " was never issued");
}

void DiskEngine::cut(std::vector<Piece>& pieces, Piece whole) const {
    if (whole.operation == Operation::kWrite && !in_blocks(whole) && is_direct(whole.fd))  // tmpfs takes it
        throw std::invalid_argument("a write to a direct file must have whole blocks of " +
                                    std::to_string(kBlockBytes) + " bytes, in memory too");
    const std::size_t nbytes = whole.nbytes;
    for (std::size_t at = 0; at < nbytes; at += options_.request_bytes) {
        Piece piece = whole;
        piece.offset += at;
        piece.address += at;
        piece.nbytes = piece.needed = std::min(options_.request_bytes, nbytes - at);
        pieces.push_back(piece);
    }
}

void DiskEngine::cut_into_bounces(std::vector<Piece>& pieces, const Piece& whole) const {
    const std::uint64_t end = whole.offset + whole.nbytes;
    for (std::uint64_t at = whole.offset / kBlockBytes * kBlockBytes; at < end; at += kBounceBytes) {
        Piece piece = whole;
        piece.offset = at;
        piece.skip = at < whole.offset ? whole.offset - at : 0;
        piece.needed = std::min<std::uint64_t>(kBounceBytes, end - at);
        piece.nbytes = round_up(piece.needed, kBlockBytes);
        piece.target = whole.address + (at + piece.skip - whole.offset);
        pieces.push_back(piece);
    }
}

std::uint64_t DiskEngine::start(Operation operation, int fd, std::uint64_t offset, char* address, std::size_t nbytes) {
    std::vector<Piece> pieces;
    pieces.reserve(nbytes / options_.request_bytes + 1);
    Piece whole;
    whole.fd = fd;
    whole.operation = operation;
    whole.offset = offset;
    whole.address = address;
    whole.nbytes = nbytes;
    if (operation == Operation::kRead && !in_blocks(whole) && is_direct(fd))
        cut_into_bounces(pieces, whole);
    else
        cut(pieces, whole);
    return submit(std::move(pieces));
}

std::uint64_t DiskEngine::start_pages(Operation operation, int fd, const std::int64_t* pages, std::size_t count,
                                      char* address) {
    std::vector<Piece> pieces;
    for (std::size_t at = 0; at < count;) {
        std::size_t end = at + 1;
        while (end < count && pages[end] == pages[end - 1] + 1) ++end;
        Piece run;
        run.fd = fd;
        run.operation = operation;
        run.offset = static_cast<std::uint64_t>(pages[at]) * kBlockBytes;
        run.address = address + at * kBlockBytes;
        run.nbytes = (end - at) * kBlockBytes;
        cut(pieces, run);
        at = end;
    }
    return submit(std::move(pieces));
}

std::uint64_t DiskEngine::submit(std::vector<Piece> pieces) {
    expect_own_process();
    std::uint64_t ticket;
    std::shared_ptr<PieceQueue> queue;
    {
        const std::lock_guard lock(mutex_);
        if (!queue_) throw std::runtime_error("the disk engine is closed");
        queue = queue_;
        ticket = next_ticket_++;
        for (Piece& piece : pieces) {
            piece.ticket = ticket;
            apply_injections(piece);
        }
        if (!pieces.empty()) tickets_.emplace(ticket, Ticket{pieces.size(), 0, 0});
    }
    // Outside the lock: completions take it.
    if (!pieces.empty()) queue->push(std::move(pieces));
    return ticket;
}

void DiskEngine::on_finished(const Piece& piece) {
    (piece.operation == Operation::kRead ? bytes_read_ : bytes_written_)
        .fetch_add(piece.moved(), std::memory_order_relaxed);
    const std::lock_guard lock(mutex_);
    const auto entry = tickets_.find(piece.ticket);
    Ticket& ticket = entry->second;
    if (piece.error != 0 && (ticket.error == 0 || piece.offset < ticket.error_offset)) {
        ticket.error = piece.error;
        ticket.error_offset = piece.offset;
    }
    if (--ticket.pieces_left > 0) return;
    if (ticket.error == 0) tickets_.erase(entry);
    finished_->notify_all();
}

void DiskEngine::wait(std::uint64_t ticket) {
    expect_own_process();
    std::unique_lock lock(mutex_);
    expect_known(ticket);
    int error = 0;
    finished_->wait(lock, [&] {
        const auto entry = tickets_.find(ticket);
        if (entry == tickets_.end()) return true;
        if (entry->second.pieces_left > 0) return false;
        error = entry->second.error;
        tickets_.erase(entry);
        return true;
    });
    if (error == kFileEnds)
        throw std::system_error(EIO, std::generic_category(), "the file is shorter than it must be");
    if (error != 0) throw std::system_error(error, std::generic_category());
}

bool DiskEngine::done(std::uint64_t ticket) {
    expect_own_process();
    const std::lock_guard lock(mutex_);
    expect_known(ticket);
    const auto entry = tickets_.find(ticket);
    return entry == tickets_.end() || entry->second.pieces_left == 0;
}

void DiskEngine::close() {
    if (::getpid() != process_) {
        // The engine's threads stayed in the parent, and so did whoever was waiting: destroying the queue would join
        // nobody, destroying the condition would wait for them. Let go of both; the child's memory is its own.
        static_cast<void>(new std::shared_ptr<PieceQueue>(std::move(queue_)));
        static_cast<void>(finished_.release());
        return;
    }
    std::shared_ptr<PieceQueue> queue;
    {
        const std::lock_guard lock(mutex_);
        queue = std::move(queue_);
        queue_.reset();
    }
    // The last owner destroys the queue, which finishes what is in flight. That may be a start() in another thread, so
    // wait for the tickets too.
    queue.reset();
    std::unique_lock lock(mutex_);
    finished_->wait(lock, [&] {
        return std::all_of(tickets_.begin(), tickets_.end(),
                           [](const auto& entry) { return entry.second.pieces_left == 0; });
    });
}

void DiskEngine::inject(Operation operation, std::uint64_t nth, int error, std::int64_t short_bytes) {
    if (nth == 0) throw std::invalid_argument("nth counts from 1");
    const std::lock_guard lock(mutex_);
    injections_.push_back({operation, nth, error, short_bytes});
}

void DiskEngine::apply_injections(Piece& piece) {
    for (auto injection = injections_.begin(); injection != injections_.end();) {
        if (injection->operation != piece.operation || --injection->countdown > 0) {
            ++injection;
            continue;
        }
        piece.injected_error = injection->error;
        piece.injected_short = injection->short_bytes;
        injection = injections_.erase(injection);
    }
}

}  // namespace outsize
