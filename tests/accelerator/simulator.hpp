// The simulated machine: device memory, streams with queues, events, a race detector, counts of waits, and a clock.
// It knows bytes and addresses, no tensors. One lock guards all of it; nothing under that lock takes the interpreter's.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

namespace sim {

using Address = std::uintptr_t;
using Ticks = std::vector<std::uint64_t>;  // a vector clock: actor 0 is the host, actor 1 + s is stream s

constexpr int kStreams = 64;                          // streams are handed out in turn, as CUDA's 32 are
constexpr int kDefaultStreams[] = {0, kStreams - 1};  // of each device

struct Range {
    Address first = 0, last = 0;  // [first, last)
    bool overlaps(Range other) const { return first < other.last && other.first < last; }
};

struct Access {
    Range range;
    bool write = false;
};

// A point in a stream's queue: what an event holds.
struct Marker {
    int stream = 0;
    std::uint64_t sequence = 0;
    Ticks ticks;
    double time = 0;  // when the clock says that it is over
    int asked = 0;    // how often a host thread has asked for it in vain
};

struct Item {
    enum Kind { kCopy, kFill, kWait } kind = kCopy;
    Range source, target;        // addresses that the host can read
    std::uint64_t checksum = 0;  // of the source, at the call
    bool source_on_host = false;
    bool target_poisoned = false;
    std::string place;
    std::shared_ptr<Marker> marker;  // of a wait
};

struct Stream {
    std::deque<Item> queue;
    std::uint64_t issued = 0, done = 0;
    Ticks ticks;
    double free_at = 0;
};

enum class Policy { kNow, kHold, kRandom };

struct Rates {  // of the clock, in units a second
    double flops = 0, memory = 0, to_device = 0, to_host = 0, launch = 0;
};

struct Count {
    std::uint64_t calls = 0;
    double seconds = 0;
};

class Machine {
  public:
    static Machine& get();

    // Memory. Tensors carry device addresses, which nobody can read; `mine` gives the simulator's own address.
    void* mine(const void* device) const;
    bool on_device(Address address) const { return address >= device_ && address < device_ + kSpan; }
    void* allocate(std::size_t nbytes, int stream, const std::string& place);
    void free(void* pointer);
    void record_use(void* pointer, int stream);
    void empty_cache();
    void set_cap(std::size_t bytes);
    std::size_t cap() const { return cap_; }
    std::size_t available();
    void set_pool(int pool);             // of the calling thread: 0 is everybody's
    std::map<int, std::size_t> pools();  // bytes allocated in each
    c10::CachingDeviceAllocator::DeviceStats stats;

    // Pinned host memory: whole allocations and registered ranges.
    void pin(Address first, std::size_t nbytes, std::function<void()> release);
    void unpin(Address first, bool registered);
    bool pinned(Range range);

    // Work. A kernel runs at its launch, behind everything its stream is to wait for. Copies may be held back.
    void run(int stream, const std::string& place, const std::vector<Access>& accesses, double flops, double bytes,
             const std::function<void()>& kernel);
    void also_wrote(int stream, const std::string& place, Range range);
    void copy(int stream, const std::string& place, Range source, Range target, bool to_device, bool blocking,
              bool pinned);
    std::shared_ptr<Marker> record(int stream);
    void wait(int stream, const std::shared_ptr<Marker>& marker);
    bool query(const std::shared_ptr<Marker>& marker);
    void synchronize(const std::shared_ptr<Marker>& marker, const char* kind, const std::string& place);
    void synchronize_device(const std::string& place, const std::vector<int>& streams);
    int new_stream();

    // What the host itself reads or writes in pinned memory, as far as it can be seen.
    void host_access(const std::string& place, const Access& access);

    // Settings and findings.
    void set_policy(Policy policy, std::uint64_t seed);
    void set_clock(bool on, Rates rates);
    void reset();  // wait for everything, then forget what was ordered, counted and found
    std::vector<std::string> problems();
    std::map<std::tuple<std::string, std::uint64_t, std::string>, Count> counts();
    void reset_counts();
    bool detects = true;

  private:
    Machine();

    struct Block {
        std::size_t size = 0;
        int stream = 0;
        int pool = 0;
        std::vector<int> users;
    };
    struct Freed {
        Address address;
        Block block;
        std::vector<std::shared_ptr<Marker>> markers;
    };
    struct Pin {
        std::size_t nbytes = 0;
        bool registered = false;
        std::function<void()> release;
        bool dead = false;
    };
    struct Epoch {
        int actor = 0;
        std::uint64_t tick = 0;
        std::string what;
    };
    struct Cell {  // what was last done to a range of bytes
        Address last = 0;
        Epoch write;
        std::vector<Epoch> reads;
    };
    using Lock = std::unique_lock<std::recursive_mutex>;

    static constexpr std::size_t kSpan = std::size_t{1} << 38;

    void drain(int stream, std::uint64_t sequence);
    void execute(Item& item);
    void push(int stream, Item item);
    void jiggle();
    bool held(Range range);
    bool is_done(const Marker& marker) { return streams_[marker.stream].done >= marker.sequence; }
    void begin(int stream);
    void check(const Ticks& now, const Epoch& who, const Access& access);
    void split(Address at);
    void problem(const std::string& text, bool raise);
    void take_back_freed(bool force);
    void sweep_pins();
    double occupy(std::vector<std::pair<double, double>>& engine, double ready, double seconds);
    void sleep_until(Lock& lock, double time, const char* kind, const std::string& place);
    std::shared_ptr<Marker> marker_of(int stream);

    std::recursive_mutex mutex_;
    Address device_ = 0, mine_ = 0, fresh_ = 0;
    std::size_t cap_ = std::size_t{16} << 30;
    std::map<Address, Block> blocks_;
    std::vector<std::pair<Address, Block>> cache_;  // the block freed last is the first to be given out
    std::vector<Freed> freed_;
    std::map<Address, Pin> pins_;
    std::vector<Stream> streams_{kStreams};
    int next_stream_ = 1;
    Ticks host_;
    std::map<Address, Cell> shadow_;
    Policy policy_ = Policy::kNow;
    std::mt19937_64 random_;
    bool clock_ = false;
    Rates rates_;
    std::vector<std::pair<double, double>> compute_, in_, out_;  // when each engine is busy
    std::vector<std::string> problems_;
    std::map<std::tuple<std::string, std::uint64_t, std::string>, Count> counts_;
};

}  // namespace sim
