#include "simulator.hpp"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

namespace sim {

namespace {

constexpr std::size_t kRound = 512;  // as CUDA's allocator rounds
constexpr Address kPage = 4096;
constexpr int kPoison = 0xFF;  // not a number in every floating type
thread_local int current_pool = 0;
constexpr int kAsksInVain = 3;  // a held copy runs once somebody has asked for it this often

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::uint64_t checksum(Range range) {
    std::uint64_t sum = 1469598103934665603ULL;
    auto* bytes = reinterpret_cast<const unsigned char*>(range.first);
    std::size_t size = range.last - range.first, at = 0;
    for (; at + 8 <= size; at += 8) {
        std::uint64_t word;
        std::memcpy(&word, bytes + at, 8);
        sum = (sum ^ word) * 1099511628211ULL;
        sum ^= sum >> 29;
    }
    for (; at < size; ++at) sum = (sum ^ bytes[at]) * 1099511628211ULL;
    return sum;
}

bool is_poison(Range range) {
    auto* bytes = reinterpret_cast<const unsigned char*>(range.first);
    return std::all_of(bytes, bytes + (range.last - range.first), [](unsigned char b) { return b == kPoison; });
}

void join(Ticks& into, const Ticks& other) {
    for (std::size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], other[i]);
}

void* reserve(std::size_t size, int protection) {
    void* at = mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "the simulated device cannot reserve ", size, " bytes of addresses");
    return at;
}

}  // namespace

Machine& Machine::get() {
    static auto* machine = new Machine;  // never destroyed: tensors may outlive everything
    return *machine;
}

Machine::Machine() : host_(1 + kStreams) {
    device_ = reinterpret_cast<Address>(reserve(kSpan, PROT_NONE));
    mine_ = reinterpret_cast<Address>(reserve(kSpan, PROT_READ | PROT_WRITE));
    fresh_ = device_;
    for (auto& stream : streams_) stream.ticks.resize(1 + kStreams);
}

// ---- memory ----

void* Machine::mine(const void* device) const {
    auto address = reinterpret_cast<Address>(device);
    return address == 0 ? nullptr : reinterpret_cast<void*>(address - device_ + mine_);
}

void Machine::set_pool(int pool) { current_pool = pool; }

std::map<int, std::size_t> Machine::pools() {
    Lock lock(mutex_);
    std::map<int, std::size_t> bytes;
    for (auto& [address, block] : blocks_) bytes[block.pool] += block.size;
    return bytes;
}

void* Machine::allocate(std::size_t nbytes, int stream, const std::string& place) {
    if (nbytes == 0) return nullptr;
    Lock lock(mutex_);
    std::size_t size = (nbytes + kRound - 1) / kRound * kRound;
    take_back_freed(false);
    Address address = 0;
    for (int attempt = 0; address == 0; ++attempt) {
        for (auto it = cache_.rbegin(); it != cache_.rend(); ++it) {
            if (it->second.stream == stream && it->second.pool == current_pool && it->second.size >= size &&
                it->second.size <= 2 * size) {
                address = it->first;
                size = it->second.size;
                cache_.erase(std::next(it).base());
                break;
            }
        }
        if (address) break;
        if (static_cast<std::size_t>(stats.reserved_bytes[0].current) + size <= cap_) {
            address = fresh_;
            fresh_ += size;
            TORCH_CHECK(fresh_ < device_ + kSpan, "the simulated device has run out of addresses");
            stats.reserved_bytes[0].increase(size);
        } else if (attempt == 0) {
            empty_cache();
        } else {
            ++stats.num_ooms;
            TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", nbytes,
                             " bytes. The device has ", cap_, " bytes, of which ", stats.allocated_bytes[0].current,
                             " are allocated (", place, ")");
        }
    }
    blocks_[address] = Block{size, stream, current_pool, {}};
    stats.allocation[0].increase(1);
    stats.allocated_bytes[0].increase(size);
    stats.active_bytes[0].increase(size);
    stats.requested_bytes[0].increase(size);
    // The poison is written in the order of the stream, as the first thing that its new owner does.
    Item item;
    item.kind = Item::kFill;
    item.target = {address - device_ + mine_, address - device_ + mine_ + size};
    begin(stream);
    auto& ticks = streams_[stream].ticks;
    try {
        check(ticks, {1 + stream, ticks[1 + stream], "new block, " + place}, {{address, address + size}, true});
        push(stream, std::move(item));
    } catch (...) {
        free(reinterpret_cast<void*>(address));
        throw;
    }
    return reinterpret_cast<void*>(address);
}

void Machine::free(void* pointer) {
    if (!pointer) return;
    Lock lock(mutex_);
    auto it = blocks_.find(reinterpret_cast<Address>(pointer));
    if (it == blocks_.end()) return;
    Freed freed{it->first, it->second, {}};
    blocks_.erase(it);
    stats.allocation[0].decrease(1);
    stats.allocated_bytes[0].decrease(freed.block.size);
    stats.active_bytes[0].decrease(freed.block.size);
    stats.requested_bytes[0].decrease(freed.block.size);
    for (int user : freed.block.users) freed.markers.push_back(marker_of(user));
    freed.block.users.clear();
    if (freed.markers.empty())
        cache_.emplace_back(freed.address, freed.block);
    else
        freed_.push_back(std::move(freed));
}

void Machine::take_back_freed(bool force) {
    for (std::size_t i = 0; i < freed_.size();) {
        bool over = true;
        for (auto& marker : freed_[i].markers) {
            if (force) drain(marker->stream, marker->sequence);
            over = over && is_done(*marker) && (force || !clock_ || now() >= marker->time);
        }
        if (!over) {
            ++i;
            continue;
        }
        for (auto& marker : freed_[i].markers) join(host_, marker->ticks);
        cache_.emplace_back(freed_[i].address, freed_[i].block);
        freed_.erase(freed_.begin() + static_cast<std::ptrdiff_t>(i));
    }
}

void Machine::record_use(void* pointer, int stream) {
    Lock lock(mutex_);
    auto it = blocks_.find(reinterpret_cast<Address>(pointer));
    if (it != blocks_.end() && it->second.stream != stream) it->second.users.push_back(stream);
}

void Machine::empty_cache() {
    Lock lock(mutex_);
    take_back_freed(true);
    for (int s = 0; s < kStreams; ++s) {  // giving memory back waits for the device, as cudaFree does
        drain(s, streams_[s].issued);
        if (!cache_.empty()) join(host_, streams_[s].ticks);
    }
    for (auto& [address, block] : cache_) {
        Address first = (address + kPage - 1) / kPage * kPage, last = (address + block.size) / kPage * kPage;
        if (first < last)  // whole pages only: others lie on the same ones
            madvise(reinterpret_cast<void*>(first - device_ + mine_), last - first, MADV_DONTNEED);
        stats.reserved_bytes[0].decrease(block.size);
    }
    cache_.clear();
}

void Machine::set_cap(std::size_t bytes) {
    Lock lock(mutex_);
    empty_cache();
    cap_ = bytes;
}

std::size_t Machine::available() {
    Lock lock(mutex_);
    auto used = static_cast<std::size_t>(stats.reserved_bytes[0].current);
    return used < cap_ ? cap_ - used : 0;
}

// ---- pinned memory ----

void Machine::pin(Address first, std::size_t nbytes, std::function<void()> release) {
    Lock lock(mutex_);
    bool registered = !release;
    pins_[first] = Pin{nbytes, registered, std::move(release), false};
}

void Machine::unpin(Address first, bool registered) {
    Lock lock(mutex_);
    auto it = pins_.find(first);
    TORCH_CHECK(it != pins_.end() && it->second.registered == registered, "address ", first, " is not pinned");
    Range range{first, first + it->second.nbytes};
    if (registered && held(range)) {
        problem("host memory is unpinned while a copy of it is in flight", true);
        return;
    }
    it->second.dead = true;
    sweep_pins();
}

void Machine::sweep_pins() {
    for (auto it = pins_.begin(); it != pins_.end();) {
        Range range{it->first, it->first + it->second.nbytes};
        if (!it->second.dead || held(range)) {
            ++it;
            continue;
        }
        split(range.first);
        split(range.last);
        shadow_.erase(shadow_.lower_bound(range.first), shadow_.lower_bound(range.last));
        auto release = std::move(it->second.release);
        it = pins_.erase(it);
        if (release) release();
    }
}

bool Machine::pinned(Range range) {
    Lock lock(mutex_);
    auto it = pins_.upper_bound(range.first);
    if (it == pins_.begin()) return false;
    --it;
    return !it->second.dead && range.last <= it->first + it->second.nbytes;
}

// ---- streams ----

void Machine::begin(int stream) {
    join(streams_[stream].ticks, host_);
    ++streams_[stream].ticks[1 + stream];
}

void Machine::push(int stream, Item item) {
    streams_[stream].queue.push_back(std::move(item));
    ++streams_[stream].issued;
    if (policy_ == Policy::kNow) drain(stream, streams_[stream].issued);
}

void Machine::drain(int stream, std::uint64_t sequence) {
    auto& of = streams_[stream];
    while (of.done < sequence) {
        Item item = std::move(of.queue.front());
        if (item.kind == Item::kWait) drain(item.marker->stream, item.marker->sequence);
        of.queue.pop_front();
        ++of.done;
        execute(item);
    }
}

void Machine::execute(Item& item) {
    auto size = item.target.last - item.target.first;
    if (item.kind == Item::kFill) std::memset(reinterpret_cast<void*>(item.target.first), kPoison, size);
    if (item.kind != Item::kCopy) return;
    bool spoilt = item.source_on_host && checksum(item.source) != item.checksum;
    bool written = item.target_poisoned && !is_poison(item.target);
    std::memcpy(reinterpret_cast<void*>(item.target.first), reinterpret_cast<void*>(item.source.first), size);
    if (spoilt) problem("the source of a copy was overwritten in flight: " + item.place, true);
    if (written) problem("the target of a copy was written in flight: " + item.place, true);
}

void Machine::jiggle() {
    if (policy_ != Policy::kRandom) return;
    for (int s = 0; s < kStreams; ++s)
        if (!streams_[s].queue.empty() && random_() % 4 == 0) drain(s, streams_[s].done + 1);
}

bool Machine::held(Range range) {
    for (auto& stream : streams_)
        for (auto& item : stream.queue)
            if (item.kind == Item::kCopy && (item.source.overlaps(range) || item.target.overlaps(range))) return true;
    return false;
}

void Machine::run(int stream, const std::string& place, const std::vector<Access>& accesses, double flops, double bytes,
                  const std::function<void()>& kernel) {
    Lock lock(mutex_);
    jiggle();
    drain(stream, streams_[stream].issued);
    begin(stream);
    auto& of = streams_[stream];
    for (auto& access : accesses) check(of.ticks, {1 + stream, of.ticks[1 + stream], place}, access);
    if (clock_) {
        double seconds = rates_.launch + std::max(flops / rates_.flops, bytes / rates_.memory);
        of.free_at = occupy(compute_, std::max(now(), of.free_at), seconds);
    }
    kernel();
}

void Machine::also_wrote(int stream, const std::string& place, Range range) {
    Lock lock(mutex_);
    auto& ticks = streams_[stream].ticks;
    check(ticks, {1 + stream, ticks[1 + stream], place}, {range, true});
}

void Machine::copy(int stream, const std::string& place, Range source, Range target, bool to_device, bool blocking,
                   bool pinned) {
    Lock lock(mutex_);
    jiggle();
    begin(stream);
    auto& of = streams_[stream];
    Epoch who{1 + stream, of.ticks[1 + stream], place};
    if (to_device ? pinned : true) check(of.ticks, who, {source, false});
    if (to_device ? true : pinned) check(of.ticks, who, {target, true});
    if (clock_) {
        double seconds =
            rates_.launch + double(source.last - source.first) / (to_device ? rates_.to_device : rates_.to_host);
        of.free_at = occupy(to_device ? in_ : out_, std::max(now(), of.free_at), seconds);
    }
    auto own = [&](Range r) {
        return on_device(r.first) ? Range{r.first - device_ + mine_, r.last - device_ + mine_} : r;
    };
    Item item;
    item.kind = Item::kCopy;
    item.source = own(source);
    item.target = own(target);
    item.place = place;
    item.source_on_host = to_device;
    bool waits = !blocking && policy_ != Policy::kNow;
    if (waits) {
        if (to_device) item.checksum = checksum(item.source);
        // Another copy in flight may still read what is to be overwritten.
        if (!held(item.target)) {
            std::memset(reinterpret_cast<void*>(item.target.first), kPoison, item.target.last - item.target.first);
            item.target_poisoned = !to_device;
        }
    } else {
        item.source_on_host = false;
    }
    push(stream, std::move(item));
    if (!blocking) return;
    drain(stream, of.issued);
    join(host_, of.ticks);
    sleep_until(lock, of.free_at, pinned ? "pinned copy" : "pageable copy", place);
}

std::shared_ptr<Marker> Machine::marker_of(int stream) {
    auto& of = streams_[stream];
    join(of.ticks, host_);
    return std::make_shared<Marker>(Marker{stream, of.issued, of.ticks, of.free_at, 0});
}

std::shared_ptr<Marker> Machine::record(int stream) {
    Lock lock(mutex_);
    jiggle();
    return marker_of(stream);
}

void Machine::wait(int stream, const std::shared_ptr<Marker>& marker) {
    Lock lock(mutex_);
    if (!marker) return;
    auto& of = streams_[stream];
    join(of.ticks, marker->ticks);
    of.free_at = std::max(of.free_at, marker->time);
    if (is_done(*marker) || marker->stream == stream) return;
    Item item;
    item.kind = Item::kWait;
    item.marker = marker;
    push(stream, std::move(item));
}

bool Machine::query(const std::shared_ptr<Marker>& marker) {
    Lock lock(mutex_);
    if (!marker) return true;
    jiggle();
    if (!is_done(*marker)) {
        if (++marker->asked < kAsksInVain) return false;
        drain(marker->stream, marker->sequence);
    }
    if (clock_ && now() < marker->time) return false;
    join(host_, marker->ticks);
    sweep_pins();
    return true;
}

void Machine::synchronize(const std::shared_ptr<Marker>& marker, const char* kind, const std::string& place) {
    Lock lock(mutex_);
    if (marker) {
        drain(marker->stream, marker->sequence);
        join(host_, marker->ticks);
        sweep_pins();
    }
    sleep_until(lock, marker ? marker->time : 0, kind, place);
}

void Machine::synchronize_device(const std::string& place, const std::vector<int>& streams) {
    Lock lock(mutex_);
    double time = 0;
    for (int s : streams) {
        drain(s, streams_[s].issued);
        join(host_, streams_[s].ticks);
        time = std::max(time, streams_[s].free_at);
    }
    sweep_pins();
    sleep_until(lock, time, "device", place);
}

int Machine::new_stream() {
    Lock lock(mutex_);
    int stream = next_stream_;
    next_stream_ = stream + 1 < kDefaultStreams[1] ? stream + 1 : 1;
    return stream;
}

// ---- races ----

void Machine::split(Address at) {
    auto it = shadow_.lower_bound(at);
    if (it == shadow_.begin()) return;
    --it;
    if (it->first < at && at < it->second.last) {
        Cell right = it->second;
        it->second.last = at;
        shadow_.emplace(at, std::move(right));
    }
}

void Machine::check(const Ticks& now, const Epoch& who, const Access& access) {
    Range range = access.range;
    if (!detects || range.first >= range.last) return;
    auto conflict = [&](const Epoch& before, const char* verb) {
        if (before.tick == 0 || now[before.actor] >= before.tick) return;
        auto name = [](int actor) {
            return actor == 0 ? std::string("the host") : "stream " + std::to_string(actor - 1);
        };
        problem("race: " + who.what + " on " + name(who.actor) + (access.write ? " writes " : " reads ") + "what " +
                    before.what + " on " + name(before.actor) + " " + verb + ", and nothing orders them",
                false);
    };
    split(range.first);
    split(range.last);
    auto found = problems_.size();
    Address at = range.first;
    for (auto it = shadow_.lower_bound(range.first); it != shadow_.end() && it->first < range.last; ++it) {
        conflict(it->second.write, "writes");
        if (access.write) {
            for (auto& read : it->second.reads) conflict(read, "reads");
            continue;
        }
        if (at < it->first) it = std::next(shadow_.emplace(at, Cell{it->first, {}, {who}}).first);
        auto& reads = it->second.reads;
        auto mine = std::find_if(reads.begin(), reads.end(), [&](auto& read) { return read.actor == who.actor; });
        if (mine == reads.end())
            reads.push_back(who);
        else
            *mine = who;
        at = it->second.last;
    }
    if (access.write) {
        shadow_.erase(shadow_.lower_bound(range.first), shadow_.lower_bound(range.last));
        shadow_[range.first] = Cell{range.last, who, {}};
    } else if (at < range.last) {
        shadow_[at] = Cell{range.last, {}, {who}};
    }
    if (problems_.size() > found) TORCH_CHECK(false, problems_[found]);
}

void Machine::host_access(const std::string& place, const Access& access) {
    Lock lock(mutex_);
    ++host_[0];
    check(host_, {0, host_[0], place}, access);
}

void Machine::problem(const std::string& text, bool raise) {
    problems_.push_back(text);
    TORCH_CHECK(!raise, text);
}

// ---- the clock and the counts ----

double Machine::occupy(std::vector<std::pair<double, double>>& engine, double ready, double seconds) {
    // The first gap that is long enough: an engine takes the work that is ready, not the work that was put in first.
    double present = now();
    engine.erase(engine.begin(),
                 std::find_if(engine.begin(), engine.end(), [&](auto& e) { return e.second > present; }));
    auto it = engine.begin();
    for (; it != engine.end() && ready + seconds > it->first; ++it) ready = std::max(ready, it->second);
    engine.insert(it, {ready, ready + seconds});
    return ready + seconds;
}

void Machine::sleep_until(Lock& lock, double time, const char* kind, const std::string& place) {
    auto& count = counts_[{kind, static_cast<std::uint64_t>(pthread_self()), place}];
    ++count.calls;
    double seconds = clock_ ? time - now() : 0;
    if (seconds <= 0) return;
    count.seconds += seconds;
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

void Machine::set_policy(Policy policy, std::uint64_t seed) {
    Lock lock(mutex_);
    for (int s = 0; s < kStreams; ++s) drain(s, streams_[s].issued);
    policy_ = policy;
    random_.seed(seed);
}

void Machine::set_clock(bool on, Rates rates) {
    Lock lock(mutex_);
    clock_ = on;
    rates_ = rates;
    compute_.clear(), in_.clear(), out_.clear();
    for (auto& stream : streams_) stream.free_at = 0;
}

void Machine::reset() {
    Lock lock(mutex_);
    for (int s = 0; s < kStreams; ++s) {
        while (streams_[s].done < streams_[s].issued) {
            try {
                drain(s, streams_[s].issued);
            } catch (const c10::Error&) {  // it is among the problems, which are forgotten here
            }
        }
        join(host_, streams_[s].ticks);
    }
    shadow_.clear();
    problems_.clear();
    counts_.clear();
    next_stream_ = 1;
    sweep_pins();
}

std::vector<std::string> Machine::problems() {
    Lock lock(mutex_);
    return problems_;
}

std::map<std::tuple<std::string, std::uint64_t, std::string>, Count> Machine::counts() {
    Lock lock(mutex_);
    return counts_;
}

void Machine::reset_counts() {
    Lock lock(mutex_);
    counts_.clear();
}

}  // namespace sim
