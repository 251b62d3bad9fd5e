// A process-wide pool of threads that persists between calls: starting a thread costs more than a small update.
//
// Note [First touch]
// Part i of a call always runs on thread i (part 0 on the caller). A system with several memory nodes puts a page on
// the node of the thread that first touches it, so an array that was filled in parts is later updated by threads near
// it. A part never moves to whoever is free: parts are equal, and a stolen one would be far from its memory. Only where
// a thread cannot be started the caller does its part.
//
// Note [Torch's own team]
// The main thread computes with torch, and has an OpenMP team for it, whose threads spin for some milliseconds after
// each operation. Threads of ours beside them would share the cores with them. So the main thread takes its team for
// our parts too. No other thread does: it would start a second team, and where OpenMP counts more threads than cores,
// each team sleeps as soon as it has nothing to do. The team is that of the OpenMP that torch has loaded, whichever
// that is.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <system_error>
#include <thread>

#include "native.hpp"

namespace outsize {

namespace {

// One run_parts call.
struct Job {
    Job(int parts, const std::function<void(int)>& body) : body(body), left(parts - 1) {}

    void work_on(int part) {
        body(part);
        const std::lock_guard lock(mutex);
        if (--left == 0) finished.notify_all();
    }

    void wait() {
        std::unique_lock lock(mutex);
        finished.wait(lock, [this] { return left == 0; });
    }

    const std::function<void(int)>& body;  // outlives the job: the caller waits for every part
    std::mutex mutex;
    std::condition_variable finished;
    int left;  // parts on pool threads that have not finished
};

// One thread, which does the same part of every job, in the order in which they come.
class Worker {
  public:
    explicit Worker(int part) : part_(part), thread_([this] { serve(); }) {}

    void push(std::shared_ptr<Job> job) {
        {
            const std::lock_guard lock(mutex_);
            jobs_.push_back(std::move(job));
        }
        changed_.notify_one();
    }

  private:
    void serve() {
        std::unique_lock lock(mutex_);
        while (true) {
            changed_.wait(lock, [this] { return !jobs_.empty(); });
            const std::shared_ptr<Job> job = std::move(jobs_.front());
            jobs_.pop_front();
            lock.unlock();
            job->work_on(part_);
            lock.lock();
        }
    }

    const int part_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::shared_ptr<Job>> jobs_;
    std::thread thread_;  // last: it uses all of the above
};

// Immortal: its threads wait in it until the process ends, so nothing has to be joined at exit or after a fork.
class WorkerPool {
  public:
    void run(int parts, const std::function<void(int)>& body) {
        std::shared_ptr<Job> job;
        int served = 1;  // parts that have a thread; part 0 has the caller
        {
            const std::lock_guard lock(mutex_);
            try {
                while (static_cast<int>(workers_.size()) < parts - 1)
                    workers_.push_back(std::make_unique<Worker>(static_cast<int>(workers_.size()) + 1));
            } catch (const std::system_error&) {  // the process may have no more: slower, but not wrong
            }
            served = std::min(parts, static_cast<int>(workers_.size()) + 1);
            job = std::make_shared<Job>(served, body);
            for (int part = 1; part < served; ++part) workers_[static_cast<std::size_t>(part) - 1]->push(job);
        }
        body(0);
        for (int part = served; part < parts; ++part) body(part);
        job->wait();
    }

  private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<Worker>> workers_;  // workers_[i] does part i + 1
};

std::atomic<WorkerPool*> process_pool{nullptr};

// Torch's OpenMP, as GCC's ABI has it; null where torch has none, or another.
struct Team {
    void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
    int (*most)() = nullptr;
    int (*size)() = nullptr;
    int (*own)() = nullptr;

    Team() {
        void* torch = ::dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
        if (torch == nullptr) return;
        find(torch, "omp_get_max_threads", most);
        find(torch, "omp_get_num_threads", size);
        find(torch, "omp_get_thread_num", own);
        if (most != nullptr && size != nullptr && own != nullptr) find(torch, "GOMP_parallel", parallel);
    }

    bool serves() const { return parallel != nullptr && most() > 1; }

    void run(int parts, const std::function<void(int)>& body) const {
        struct Work {
            const Team& team;
            int parts;
            const std::function<void(int)>& body;
        } work{*this, parts, body};
        const auto each = [](void* data) {
            const Work& work = *static_cast<const Work*>(data);
            for (int part = work.team.own(); part < work.parts; part += work.team.size()) work.body(part);
        };
        parallel(each, &work, 0, 0);
    }

  private:
    template <class Function>
    static void find(void* library, const char* name, Function*& function) {
        function = reinterpret_cast<Function*>(::dlsym(library, name));
    }
};

// Threads do not survive a fork: the child forgets its parent's pool, and starts its own when it needs one. A team it
// cannot have: OpenMP does not start anew.
std::atomic<bool> forked{false};

const int forget_after_fork = ::pthread_atfork(nullptr, nullptr, [] {
    process_pool.store(nullptr);
    forked.store(true);
});

// The calling thread's, or null.
const Team* team() {
    if (forked.load() || ::syscall(SYS_gettid) != ::getpid()) return nullptr;
    static const Team found;
    return found.serves() ? &found : nullptr;
}

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
    else if (const Team* torch = team())
        torch->run(parts, body);
    else
        pool().run(parts, body);
}

}  // namespace outsize
