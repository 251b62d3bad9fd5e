// A process-wide pool of threads that persists between calls: starting a thread costs more than a small update.
#include <pthread.h>

#include <deque>
#include <thread>

#include "native.hpp"

namespace outsize {

namespace {

// One run_parts call. Whoever is free, the caller included, takes the next part.
struct Job {
    Job(int parts, const std::function<void(int)>& body) : parts(parts), body(body), left(parts) {}

    bool work_on_one() {
        const int part = next.fetch_add(1);
        if (part >= parts) return false;
        body(part);
        const std::lock_guard lock(mutex);
        if (--left == 0) finished.notify_all();
        return true;
    }

    const int parts;
    const std::function<void(int)>& body;  // outlives the job: the caller waits for every part
    std::atomic<int> next{0};
    std::mutex mutex;
    std::condition_variable finished;
    int left;
};

// Immortal: its threads wait in it until the process ends, so nothing has to be joined at exit or after a fork.
class WorkerPool {
  public:
    void run(int parts, const std::function<void(int)>& body) {
        const auto job = std::make_shared<Job>(parts, body);
        const int helpers = parts - 1;
        {
            const std::lock_guard lock(mutex_);
            while (static_cast<int>(threads_.size()) < helpers) threads_.emplace_back([this] { serve(); });
            jobs_.insert(jobs_.end(), static_cast<std::size_t>(helpers), job);
        }
        changed_.notify_all();
        while (job->work_on_one()) {
        }
        std::unique_lock lock(job->mutex);
        job->finished.wait(lock, [&] { return job->left == 0; });
    }

  private:
    void serve() {
        std::unique_lock lock(mutex_);
        while (true) {
            changed_.wait(lock, [this] { return !jobs_.empty(); });
            const std::shared_ptr<Job> job = std::move(jobs_.front());
            jobs_.pop_front();
            lock.unlock();
            while (job->work_on_one()) {
            }
            lock.lock();
        }
    }

    std::mutex mutex_;  // guards everything below
    std::condition_variable changed_;
    std::deque<std::shared_ptr<Job>> jobs_;
    std::vector<std::thread> threads_;
};

std::atomic<WorkerPool*> process_pool{nullptr};

// Threads do not survive a fork: the child forgets its parent's pool and starts its own when it needs one.
const int forget_after_fork = ::pthread_atfork(nullptr, nullptr, [] { process_pool.store(nullptr); });

WorkerPool& pool() {
    static_cast<void>(forget_after_fork);
    if (WorkerPool* current = process_pool.load()) return *current;
    auto fresh = std::make_unique<WorkerPool>();  // has no threads yet
    WorkerPool* current = nullptr;
    return process_pool.compare_exchange_strong(current, fresh.get()) ? *fresh.release() : *current;
}

}  // namespace

void run_parts(int parts, const std::function<void(int)>& body) {
    if (parts == 1)
        body(0);
    else
        pool().run(parts, body);
}

}  // namespace outsize
