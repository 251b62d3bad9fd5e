// A queue served by a few threads with pread and pwrite: for machines that refuse io_uring.
#include <unistd.h>

#include <cerrno>
#include <deque>
#include <thread>

#include "native.hpp"

namespace outsize {

namespace {

class ThreadsQueue final : public PieceQueue {
  public:
    ThreadsQueue(PieceListener& listener, int threads)
        : listener_(listener), bounces_(static_cast<std::size_t>(threads)) {
        threads_.reserve(static_cast<std::size_t>(threads));
        try {
            for (int i = 0; i < threads; ++i) threads_.emplace_back([this, i] { serve(static_cast<std::size_t>(i)); });
        } catch (...) {
            stop();
            throw;
        }
    }

    ~ThreadsQueue() override { stop(); }

    void push(std::vector<Piece> pieces) override {
        {
            const std::lock_guard lock(mutex_);
            waiting_.insert(waiting_.end(), pieces.begin(), pieces.end());
        }
        if (pieces.size() == 1)
            changed_.notify_one();
        else
            changed_.notify_all();
    }

  private:
    void stop() {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        changed_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    void serve(std::size_t number) {
        std::unique_lock lock(mutex_);
        while (true) {
            changed_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
            if (waiting_.empty()) return;
            Piece piece = waiting_.front();
            waiting_.pop_front();
            lock.unlock();
            do {
                listener_.on_attempt();
                piece.bounce_in(bounces_, number);
            } while (!piece.advance(attempt(piece)));
            listener_.on_finished(piece);
            lock.lock();
        }
    }

    static std::int64_t attempt(const Piece& piece) {
        if (piece.injected_error != 0) return 0;
        const auto offset = static_cast<off_t>(piece.attempt_offset());
        const ssize_t result = piece.operation == Operation::kRead
                                   ? ::pread(piece.fd, piece.attempt_address(), piece.attempt_nbytes(), offset)
                                   : ::pwrite(piece.fd, piece.attempt_address(), piece.attempt_nbytes(), offset);
        return result == -1 ? -errno : result;
    }

    PieceListener& listener_;
    Bounces bounces_;
    std::mutex mutex_;  // guards waiting_ and stopping_
    std::condition_variable changed_;
    std::deque<Piece> waiting_;
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<PieceQueue> open_threads_queue(PieceListener& listener, int threads) {
    return std::make_unique<ThreadsQueue>(listener, threads);
}

}  // namespace outsize
