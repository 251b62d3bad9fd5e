// The simulated machine as a device of torch: allocator, streams, events, random numbers, operators, Python module.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/function.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <set>

#include "simulator.hpp"

namespace {

using sim::Access;
using sim::Address;
using sim::Machine;
using sim::Range;

constexpr auto kSim = c10::DeviceType::PrivateUse1;

constexpr int kDevices = 2;  // as many as a process may see

thread_local c10::DeviceIndex current_device = 0;
thread_local int current_streams[kDevices] = {sim::kDefaultStreams[0], sim::kDefaultStreams[1]};
std::atomic<c10::DeviceIndex> device_count{1};
std::array<std::atomic<c10::DeviceIndex>, sim::kStreams> device_of_stream;
std::array<std::atomic<bool>, kDevices> awake;  // with a context, which takes memory: since it was chosen or worked
thread_local bool in_kernel = false;

Machine& machine() { return Machine::get(); }
c10::Device device() { return {kSim, current_device}; }
c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }
int current_stream() { return current_streams[current_device]; }
int default_stream(c10::DeviceIndex index) { return sim::kDefaultStreams[index]; }
c10::Stream stream_of(int id, c10::Device of) { return c10::Stream(c10::Stream::UNSAFE, {kSim, index_of(of)}, id); }
c10::Stream new_stream(c10::Device of) {
    int id = machine().new_stream();
    device_of_stream[id] = index_of(of);
    return stream_of(id, of);
}

// ---- where a call comes from ----

// The innermost line of Python outside torch, or the node of the backward. Needs the interpreter's lock, so it is
// taken before the simulator's.
std::string place() {
    if (!Py_IsInitialized()) return "?";
    std::string found;
    PyGILState_STATE state = PyGILState_Ensure();
    PyFrameObject* frame = PyEval_GetFrame();
    Py_XINCREF(frame);
    while (frame) {
        PyCodeObject* code = PyFrame_GetCode(frame);
        const char* name = PyUnicode_AsUTF8(code->co_filename);
        if (name && !std::strstr(name, "/torch/") && !std::strstr(name, "tests/accelerator/sim.py") &&
            !std::strstr(name, "contextlib.py"))
            found = std::string(name) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
        Py_DECREF(code);
        PyFrameObject* back = found.empty() ? PyFrame_GetBack(frame) : nullptr;
        Py_DECREF(frame);
        frame = back;
    }
    PyErr_Clear();
    PyGILState_Release(state);
    if (!found.empty()) return found;
    auto node = torch::autograd::get_current_node();
    return node ? "backward of " + node->name() : "?";
}

std::string place_of(const std::string& what) { return machine().detects ? what + " at " + place() : what; }

struct WithoutInterpreter {  // a host thread that waits lets others run Python
    PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    ~WithoutInterpreter() {
        if (state) PyEval_RestoreThread(state);
    }
};

// ---- memory ----

struct Allocator final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t nbytes) override {
        awake[current_device] = true;
        void* at = machine().allocate(nbytes, current_stream(), place_of("allocation"));
        return {at, at, &release, device()};
    }
    static void release(void* at) { machine().free(at); }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* target, const void* source, size_t nbytes) const override {
        std::memcpy(machine().mine(target), machine().mine(source), nbytes);
    }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override { machine().empty_cache(); }
    void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
        machine().record_use(data.get(), static_cast<int>(stream.id()));
    }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return machine().stats; }
    void resetAccumulatedStats(c10::DeviceIndex) override {
        for (auto* stat : all()) (*stat)[0].reset_accumulated();
    }
    void resetPeakStats(c10::DeviceIndex) override {
        for (auto* stat : all()) (*stat)[0].reset_peak();
    }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) { return {machine().available(), machine().cap()}; }
    static std::vector<c10::CachingAllocator::StatArray*> all() {
        auto& stats = machine().stats;
        return {&stats.allocation, &stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes,
                &stats.requested_bytes};
    }
};

Allocator allocator;
struct RegisterAllocator {
    RegisterAllocator() { c10::SetAllocator(kSim, &allocator); }
} register_allocator;

struct PinnedAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override {
        void* at = nullptr;
        TORCH_CHECK(posix_memalign(&at, 4096, std::max<size_t>(nbytes, 1)) == 0, "no host memory for ", nbytes);
        machine().pin(reinterpret_cast<Address>(at), nbytes, [at] { std::free(at); });
        return {at, at, &release, c10::Device(c10::kCPU)};
    }
    static void release(void* at) { machine().unpin(reinterpret_cast<Address>(at), false); }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* target, const void* source, size_t nbytes) const override {
        std::memcpy(target, source, nbytes);
    }
};

PinnedAllocator pinned_allocator;

void resize_storage(c10::StorageImpl& storage, size_t nbytes) {
    c10::DeviceGuard guard(storage.device());
    size_t kept = std::min(nbytes, storage.nbytes());
    c10::DataPtr fresh = allocator.allocate(nbytes);
    if (kept) {
        auto from = reinterpret_cast<Address>(storage.data()), to = reinterpret_cast<Address>(fresh.get());
        machine().run(current_stream(), place_of("resize_"), {{{from, from + kept}, false}, {{to, to + kept}, true}}, 0,
                      double(kept), [&] { allocator.copy_data(fresh.get(), storage.data(), kept); });
    }
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(nbytes);
}

// ---- random numbers: a host generator of its own behind the device's ----

struct Generator final : c10::GeneratorImpl {
    Generator(at::Generator host, c10::DeviceIndex index)
        : c10::GeneratorImpl({kSim, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
          host(std::move(host)) {}
    void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
    void set_offset(uint64_t) override { TORCH_CHECK(false, "sim generators have no offset"); }
    uint64_t get_offset() const override { TORCH_CHECK(false, "sim generators have no offset"); }
    uint64_t current_seed() const override { return host.current_seed(); }
    uint64_t seed() override { return host.seed(); }
    void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        return host.unsafeGetGeneratorImpl()->get_state();
    }
    static c10::DeviceType device_type() { return kSim; }
    Generator* clone_impl() const override { return new Generator(host.clone(), device().index()); }
    at::Generator host;
};

at::Generator make_generator(c10::DeviceIndex index) {
    return at::make_generator<Generator>(at::detail::createCPUGenerator(), index < 0 ? current_device : index);
}

at::Generator& default_generator(c10::DeviceIndex index) {
    static auto* generators = new std::array<at::Generator, kDevices>{make_generator(0), make_generator(1)};
    return (*generators)[index < 0 ? current_device : index];
}

// ---- streams, events, hooks ----

using Event = std::shared_ptr<sim::Marker>;

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kSim; }
    c10::Device exchangeDevice(c10::Device to) const override {
        c10::Device before = getDevice();
        setDevice(to);
        return before;
    }
    c10::Device getDevice() const override { return device(); }
    void setDevice(c10::Device to) const override {
        TORCH_CHECK(to.index() < device_count, "there are ", int(device_count), " sim devices");
        if (index_of(to) != current_device) awake[index_of(to)] = true;
        uncheckedSetDevice(to);
    }
    void uncheckedSetDevice(c10::Device to) const noexcept override { current_device = index_of(to); }
    c10::DeviceIndex deviceCount() const noexcept override { return device_count; }
    c10::Stream getStream(c10::Device of) const override { return stream_of(current_streams[index_of(of)], of); }
    c10::Stream getDefaultStream(c10::Device of) const override { return stream_of(default_stream(index_of(of)), of); }
    c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override { return new_stream(of); }
    c10::Stream getNewStream(c10::Device of, int) const override { return new_stream(of); }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        auto& current = current_streams[stream.device_index()];
        return stream_of(std::exchange(current, static_cast<int>(stream.id())), stream.device());
    }
    // As CUDA's: to these three, torch chooses the device of the event, then that of before again.
    static void visit(c10::DeviceIndex index) {
        if (index >= 0 && index != current_device) awake[index] = awake[current_device] = true;
    }
    void destroyEvent(void* event, const c10::DeviceIndex of) const noexcept override {
        if (event) visit(of);
        delete static_cast<Event*>(event);
    }
    void record(void** event, const c10::Stream& stream, const c10::DeviceIndex of,
                const c10::EventFlag) const override {
        TORCH_CHECK(of < 0 || of == stream.device_index(), "an event of one device is recorded on a stream of another");
        visit(stream.device_index());
        if (!*event) *event = new Event;
        *static_cast<Event*>(*event) = machine().record(static_cast<int>(stream.id()));
    }
    void block(void* event, const c10::Stream& stream) const override {
        if (!event) return;
        visit(stream.device_index());
        machine().wait(static_cast<int>(stream.id()), *static_cast<Event*>(event));
    }
    bool queryEvent(void* event) const override { return !event || machine().query(*static_cast<Event*>(event)); }
    void synchronizeEvent(void* event) const override {
        if (event) wait(*static_cast<Event*>(event), "event");
    }
    bool queryStream(const c10::Stream& stream) const override {
        return machine().query(machine().record(static_cast<int>(stream.id())));
    }
    void synchronizeStream(const c10::Stream& stream) const override {
        wait(machine().record(static_cast<int>(stream.id())), "stream");
    }
    void synchronizeDevice(const c10::DeviceIndex of) const override {
        auto where = place();
        WithoutInterpreter freely;
        std::vector<int> streams;
        for (int id = 0; id < sim::kStreams; ++id)
            if (device_of_stream[id] == (of < 0 ? current_device : of)) streams.push_back(id);
        machine().synchronize_device(where, streams);
    }
    void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
        machine().record_use(data.get(), static_cast<int>(stream.id()));
    }
    double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
        return ((*static_cast<Event*>(second))->time - (*static_cast<Event*>(first))->time) * 1e3;
    }
    static void wait(const Event& event, const char* kind) {
        auto where = place();
        WithoutInterpreter freely;
        machine().synchronize(event, kind, where);
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
    at::Generator getNewGenerator(c10::DeviceIndex index) const override { return make_generator(index); }
    at::Device getDeviceFromPtr(void*) const override { return device(); }
    bool isPinnedPtr(const void* data) const override {
        auto at = reinterpret_cast<Address>(data);
        return machine().pinned({at, at});
    }
    c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
    bool hasPrimaryContext(c10::DeviceIndex index) const override { return awake[index]; }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
        resize_storage(*storage.unsafeGetStorageImpl(), nbytes);
    }
    c10::DeviceIndex deviceCount() const override { return device_count; }
    void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({kSim, index}); }
    c10::DeviceIndex getCurrentDevice() const override { return current_device; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
        return Guard().exchangeDevice({kSim, index}).index();
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
        return index < 0 ? current_device : std::exchange(current_device, index);
    }
};
struct RegisterHooks {
    RegisterHooks() { at::RegisterPrivateUse1HooksInterface(new Hooks); }
} register_hooks;

// ---- operators ----

// The bytes of a tensor, exactly where it has few rows with gaps between them, else from its first to its last.
void add_ranges(std::vector<Access>& into, const at::Tensor& tensor, bool write) {
    if (!tensor.defined() || tensor.numel() == 0 || !tensor.has_storage()) return;
    auto item = static_cast<Address>(tensor.itemsize());
    auto base = reinterpret_cast<Address>(tensor.storage().data());
    if (!base) return;
    base += static_cast<Address>(tensor.storage_offset()) * item;
    std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size)
    for (int64_t d = 0; d < tensor.dim(); ++d)
        if (tensor.size(d) > 1 && tensor.stride(d) > 0) dims.emplace_back(tensor.stride(d), tensor.size(d));
    std::sort(dims.begin(), dims.end());
    int64_t run = 1;
    size_t at = 0;
    while (at < dims.size() && dims[at].first <= run) {
        run = std::max(run, (dims[at].second - 1) * dims[at].first + run);
        ++at;
    }
    int64_t rows = 1, extent = run;
    for (size_t d = at; d < dims.size(); ++d) {
        rows *= dims[d].second;
        extent += (dims[d].second - 1) * dims[d].first;
    }
    if (rows > 256) {
        into.push_back({{base, base + static_cast<Address>(extent) * item}, write});
        return;
    }
    for (int64_t row = 0; row < rows; ++row) {
        int64_t rest = row, offset = 0;
        for (size_t d = at; d < dims.size(); ++d) {
            offset += rest % dims[d].second * dims[d].first;
            rest /= dims[d].second;
        }
        auto first = base + static_cast<Address>(offset) * item;
        into.push_back({{first, first + static_cast<Address>(run) * item}, write});
    }
}

bool is_sim(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// Host tensors over the device's memory, and back. A storage gets one stand-in, so views stay views.
struct StandIns {
    std::map<c10::StorageImpl*, c10::Storage> hosts;                      // of a device's storage
    std::map<c10::StorageImpl*, std::pair<at::Tensor, Address>> devices;  // of a stand-in: the tensor, its address
    std::vector<std::pair<at::Tensor, at::Tensor>> pairs;                 // (device, stand-in)
    std::vector<at::Tensor> written;                                      // stand-ins that the operator writes
    std::vector<Access> accesses;

    at::Tensor host(const at::Tensor& tensor, bool write) {
        if (tensor.numel()) {
            auto end = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                                        tensor.storage_offset());
            TORCH_CHECK(end <= tensor.storage().nbytes(), "a tensor reaches beyond its storage, which was resized");
        }
        add_ranges(accesses, tensor, write);
        auto* key = tensor.storage().unsafeGetStorageImpl();
        auto found = hosts.find(key);
        if (found == hosts.end()) {
            void* at = machine().mine(key->data());
            c10::Storage storage(c10::Storage::use_byte_size_t(), key->nbytes(), c10::DataPtr(at, c10::kCPU),
                                 c10::GetAllocator(c10::kCPU), true);
            devices[storage.unsafeGetStorageImpl()] = {tensor, reinterpret_cast<Address>(at)};
            found = hosts.emplace(key, std::move(storage)).first;
        }
        auto made = at::detail::make_tensor<c10::TensorImpl>(
            c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
        auto* impl = made.unsafeGetTensorImpl();
        impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
        pairs.emplace_back(tensor, made);
        if (write) written.push_back(made);
        return made;
    }

    at::Tensor back(const at::Tensor& result, const std::string& where) {
        if (!result.defined() || result.device().type() != c10::kCPU) return result;
        if (result.is_sparse()) {
            at::Tensor values = back(result._values(), where);
            return at::_sparse_coo_tensor_unsafe(back(result._indices(), where), values, result.sizes(),
                                                 values.options().layout(at::kSparse), result.is_coalesced());
        }
        for (auto& [tensor, made] : pairs)
            if (made.unsafeGetTensorImpl() == result.unsafeGetTensorImpl()) return tensor;
        auto of = devices.find(result.storage().unsafeGetStorageImpl());
        if (of != devices.end()) {
            auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(of->second.first.storage()),
                                                                 c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                                 result.dtype());
            view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(),
                                                              result.storage_offset());
            return view;
        }
        at::Tensor made =
            at::detail::empty_strided_generic(result.sizes(), result.strides(), &allocator,
                                              c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.scalar_type());
        fill(made, result, where);
        return made;
    }

    // Put the bytes of a host tensor with the same strides into a device tensor: the end of a kernel.
    static void fill(const at::Tensor& made, const at::Tensor& result, const std::string& where) {
        if (result.numel() == 0) return;
        auto nbytes =
            static_cast<size_t>(at::detail::computeStorageNbytes(result.sizes(), result.strides(), result.itemsize()));
        auto* to =
            static_cast<char*>(const_cast<void*>(made.storage().data())) + made.storage_offset() * made.itemsize();
        auto first = reinterpret_cast<Address>(to);
        machine().run(current_stream(), where, {{{first, first + nbytes}, true}}, 0, 0,
                      [&] { std::memcpy(machine().mine(to), result.const_data_ptr(), nbytes); });
    }
};

double flops_of(const std::string& name, const std::vector<at::Tensor>& inputs) {
    auto product = [&](size_t a, size_t b) {
        if (inputs.size() <= b || !inputs[b].defined() || inputs[b].dim() < 2) return 0.0;
        return 2.0 * double(inputs[a].numel()) * double(inputs[b].size(-1));
    };
    if (name == "aten::mm" || name == "aten::bmm") return product(0, 1);
    if (name == "aten::addmm" || name == "aten::baddbmm") return product(1, 2);
    return 0;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    // Operators that other devices, too, give host tensors: indices and lengths.
    static const std::set<std::string> mixes = {"aten::index", "aten::index_put", "aten::_index_put_impl_",
                                                "aten::_ctc_loss", "aten::_pack_padded_sequence"};
    const auto& schema = op.schema();
    const auto& name = schema.name();
    const auto where = place_of(name);
    const size_t count = schema.arguments().size();
    const size_t first = stack->size() - count;
    StandIns stand_ins;
    std::vector<at::Tensor> inputs;
    bool mixed = mixes.count(name) != 0;
    c10::OptionalDeviceGuard guard;  // the operator runs where its tensors lie
    auto convert = [&](const at::Tensor& tensor, bool write) -> at::Tensor {
        inputs.push_back(tensor);
        if (is_sim(tensor)) {
            auto lies = tensor.device();
            TORCH_CHECK(!guard.current_device() || *guard.current_device() == lies,
                        "Expected all tensors to be on the same device, but ", name, " was given tensors on ", lies,
                        " and on ", *guard.current_device());
            if (!guard.current_device()) guard.reset_device(lies);
            return stand_ins.host(tensor, write);
        }
        TORCH_CHECK(!tensor.defined() || tensor.dim() == 0 || mixed,
                    "Expected all tensors to be on the same device, but ", name, " was given tensors on sim and on ",
                    tensor.device());
        return tensor;
    };
    c10::IValue* own_generator = nullptr;
    for (size_t i = 0; i < count; ++i) {
        auto& value = (*stack)[first + i];
        const auto& argument = schema.arguments()[i];
        bool write = argument.alias_info() && argument.alias_info()->isWrite();
        if (value.isTensor()) {
            value = convert(value.toTensor(), write);
        } else if (value.isTensorList()) {
            auto made = c10::List<at::Tensor>();
            for (const at::Tensor& tensor : value.toTensorList()) made.push_back(convert(tensor, write));
            value = std::move(made);
        } else if (value.isOptionalTensorList()) {
            auto made = c10::List<std::optional<at::Tensor>>();
            for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
                made.push_back(tensor ? std::optional<at::Tensor>(convert(*tensor, write)) : std::nullopt);
            value = std::move(made);
        } else if (value.isDevice()) {
            auto chosen = value.toDevice();
            if (chosen.type() == kSim && chosen.has_index()) guard.reset_device(chosen);
            value = c10::Device(c10::kCPU);
        } else if (value.isGenerator()) {
            auto generator = value.toGenerator();
            if (generator.device().type() == kSim)
                value = static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host;
        } else if (value.isNone() && argument.name() == "generator") {
            own_generator = &value;
        }
    }
    if (own_generator) *own_generator = static_cast<Generator*>(default_generator(-1).unsafeGetGeneratorImpl())->host;
    double bytes = 0;
    for (auto& access : stand_ins.accesses) bytes += double(access.range.last - access.range.first);
    machine().run(current_stream(), where, stand_ins.accesses, flops_of(name, inputs), bytes, [&] {
        in_kernel = true;
        try {
            op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
        } catch (...) {
            in_kernel = false;
            throw;
        }
        in_kernel = false;
    });
    // What the operator resized got memory of the host's: resize the device's tensor, too.
    for (auto& [tensor, made] : stand_ins.pairs) {
        bool grown = reinterpret_cast<Address>(made.storage().data()) !=
                     stand_ins.devices[made.storage().unsafeGetStorageImpl()].second;
        if (made.sizes() == tensor.sizes() && !grown) continue;
        auto* impl = tensor.unsafeGetTensorImpl();
        size_t nbytes = made.storage().nbytes();
        if (tensor.storage().nbytes() < nbytes) resize_storage(*tensor.storage().unsafeGetStorageImpl(), nbytes);
        impl->set_sizes_and_strides(made.sizes(), made.strides(), made.storage_offset());
        if (grown) StandIns::fill(tensor, made, where);
    }
    bool to_host = op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
    const size_t results = schema.returns().size();
    for (size_t i = stack->size() - results; i < stack->size(); ++i) {
        auto& value = (*stack)[i];
        if (value.isTensor()) {
            value = stand_ins.back(value.toTensor(), where);
        } else if (value.isTensorList()) {
            auto made = c10::List<at::Tensor>();
            for (const at::Tensor& tensor : value.toTensorList()) made.push_back(stand_ins.back(tensor, where));
            value = std::move(made);
        } else {
            to_host = true;
        }
    }
    if (to_host) Guard::wait(machine().record(current_stream()), "item");
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> on, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
    c10::OptionalDeviceGuard guard(on);
    TORCH_CHECK(!pin.value_or(false), "only host memory can be pinned");
    return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> on, std::optional<bool> pin) {
    c10::OptionalDeviceGuard guard(on);
    TORCH_CHECK(!pin.value_or(false), "only host memory can be pinned");
    return at::detail::empty_strided_generic(
        size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
    auto* impl = self.unsafeGetTensorImpl();
    if (self.sizes() != size) impl->generic_set_sizes_contiguous(size);
    if (format) impl->empty_tensor_restride(*format);
    auto nbytes =
        at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), self.storage_offset());
    if (self.numel() && nbytes > self.storage().nbytes())
        resize_storage(*self.storage().unsafeGetStorageImpl(), nbytes);
    return self;
}

at::Tensor& set_strided(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
    auto* impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(source));
    if (stride.data())
        impl->set_sizes_and_strides(size, stride, offset);
    else {
        impl->set_storage_offset(offset);
        impl->generic_set_sizes_contiguous(size);
    }
    auto nbytes =
        at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), self.storage_offset());
    if (self.numel() && nbytes > self.storage().nbytes())
        resize_storage(*self.storage().unsafeGetStorageImpl(), nbytes);
    return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
    int64_t size = static_cast<int64_t>(source.nbytes() / self.itemsize());
    return set_strided(self, std::move(source), 0, {size}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
    return set_strided(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
    c10::DeviceGuard guard(self.device());
    c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true);
    return set_strided(self, std::move(storage), 0, {0}, {1});
}

bool is_set_to(const at::Tensor& self, const at::Tensor& other) {
    return is_sim(other) && self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
           self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
           self.strides() == other.strides();
}

Range range_of(const at::Tensor& tensor) {
    auto first = reinterpret_cast<Address>(tensor.storage().data()) +
                 static_cast<Address>(tensor.storage_offset()) * tensor.itemsize();
    return {first, first + tensor.nbytes()};
}

// As CUDA: another type is converted on the source's side, gaps are closed first, and pageable memory blocks.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
    if (target.numel() == 0) return target;
    c10::DeviceGuard guard(is_sim(self) ? self.device() : target.device());
    if (is_sim(self) && is_sim(target)) {
        auto theirs = static_cast<int>(Guard().getStream(target.device()).id());  // of another device: both wait
        machine().wait(current_stream(), machine().record(theirs));
        StandIns stand_ins;
        at::Tensor from = stand_ins.host(self, false), to = stand_ins.host(target, true);
        from._set_conj(self.is_conj());
        from._set_neg(self.is_neg());
        to._set_conj(target.is_conj());
        to._set_neg(target.is_neg());
        machine().run(current_stream(), place_of("aten::copy_"), stand_ins.accesses, 0, double(2 * target.nbytes()),
                      [&] {
                          in_kernel = true;
                          to.copy_(from);
                          in_kernel = false;
                      });
        machine().wait(theirs, machine().record(current_stream()));
        return target;
    }
    at::Tensor source = self.to(target.scalar_type()).expand(target.sizes()).contiguous().resolve_conj().resolve_neg();
    if (!target.is_contiguous()) {
        at::Tensor dense = at::empty(target.sizes(), target.options().pinned_memory(false));
        copy_from(source, dense, false);
        target.copy_(dense);
        return target;
    }
    bool to_device = is_sim(target);
    bool pinned = machine().pinned(range_of(to_device ? source : target));
    bool blocking = !pinned || !non_blocking;
    std::string where = to_device ? "copy to the device" : "copy to the host";
    where = blocking ? where + " at " + place() : place_of(where);
    WithoutInterpreter freely;
    machine().copy(current_stream(), where, range_of(source), range_of(target), to_device, blocking, pinned);
    return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
    target.resize_(self.sizes());
    return copy_from(self, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
    c10::DeviceGuard guard(self.device());
    StandIns stand_ins;
    at::Tensor host = stand_ins.host(self, false);
    at::Scalar value;
    machine().run(current_stream(), place_of("item"), stand_ins.accesses, 0, 0, [&] { value = host.item(); });
    Guard::wait(machine().record(current_stream()), "item");
    return value;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
    machine().record_use(const_cast<void*>(self.storage().data()), static_cast<int>(stream.id()));
}

// torch's own kernel draws from the host's generator, which nobody can hand over here.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
    if (!train.value_or(true)) return {input.clone(), at::empty_like(input, at::kBool).fill_(true)};
    at::Tensor mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
    return {input.mul(mask).mul_(p < 1 ? 1 / (1 - p) : 0.0), mask};
}

// torch has names of their own for a convolution on a device from outside torch; the host knows it by the usual ones.
void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
    fallback(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", ""), stack);
}

void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
    const auto arguments = stack->size() - 10;  // grad_output, input, weight, stride, ..., output_mask
    c10::IValue bias_sizes;
    if (stack->back().toBoolList().get(2)) bias_sizes = std::vector<int64_t>{(*stack)[arguments].toTensor().size(1)};
    stack->insert(stack->begin() + static_cast<int64_t>(arguments) + 3, bias_sizes);
    fallback(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", ""), stack);
}

// Cells of recurrent layers, which torch has fused on every device but the host. The workspace is the backward's.
at::Tensor with_bias(const at::Tensor& gates, const std::optional<at::Tensor>& bias) {
    return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input, const at::Tensor& hidden,
                                                         const at::Tensor& cx, const std::optional<at::Tensor>& bias,
                                                         const std::optional<at::Tensor>& hidden_bias) {
    auto gates = (with_bias(input, bias) + with_bias(hidden, hidden_bias)).chunk(4, 1);
    auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
    at::Tensor cy = forget * cx + in * cell;
    return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const std::optional<at::Tensor>& grad_hy,
                                                                  const std::optional<at::Tensor>& grad_cy,
                                                                  const at::Tensor& cx, const at::Tensor& cy,
                                                                  const at::Tensor& workspace, bool has_bias) {
    auto gates = workspace.chunk(4, 1);
    auto &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
    at::Tensor of_output = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cy), shown = cy.tanh();
    at::Tensor of_cell = of_output * out * (1 - shown * shown);
    if (grad_cy && grad_cy->defined()) of_cell = of_cell + *grad_cy;
    at::Tensor of_gates = at::cat({of_cell * cell * in * (1 - in), of_cell * cx * forget * (1 - forget),
                                   of_cell * in * (1 - cell * cell), of_output * shown * out * (1 - out)},
                                  1);
    return {of_gates, of_cell * forget, has_bias ? of_gates.sum(0) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& hx,
                                            const std::optional<at::Tensor>& bias,
                                            const std::optional<at::Tensor>& hidden_bias) {
    auto from_input = with_bias(input, bias).chunk(3, 1), from_hidden = with_bias(hidden, hidden_bias).chunk(3, 1);
    at::Tensor reset = (from_input[0] + from_hidden[0]).sigmoid(), update = (from_input[1] + from_hidden[1]).sigmoid();
    at::Tensor fresh = (from_input[2] + reset * from_hidden[2]).tanh();
    return {(hx - fresh) * update + fresh, at::cat({reset, update, fresh, hx, from_hidden[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(const at::Tensor& grad_hy,
                                                                                         const at::Tensor& workspace,
                                                                                         bool has_bias) {
    auto kept = workspace.chunk(5, 1);
    auto &reset = kept[0], &update = kept[1], &fresh = kept[2], &hx = kept[3], &hidden = kept[4];
    at::Tensor of_update = grad_hy * (hx - fresh) * (1 - update) * update;
    at::Tensor of_fresh = grad_hy * (1 - update) * (1 - fresh * fresh);
    at::Tensor of_reset = of_fresh * hidden * (1 - reset) * reset;
    at::Tensor of_input = at::cat({of_reset, of_update, of_fresh}, 1);
    at::Tensor of_hidden = at::cat({of_reset, of_update, of_fresh * reset}, 1);
    if (!has_bias) return {of_input, of_hidden, grad_hy * update, {}, {}};
    return {of_input, of_hidden, grad_hy * update, of_input.sum(0), of_hidden.sum(0)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// The kernel of the host counts floating-point values alone, those of other devices whole numbers, too.
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& first, const at::Scalar& last) {
    return at::histc(self.cpu().to(at::kFloat), bins, first, last).to(self.options());
}

// A copy takes such views as they are: torch would copy them first.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("as_strided", &as_strided);
    m.impl("_reshape_alias", &reshape_alias);
    m.impl("view", &view);
    m.impl("resize_", &resize);
    m.impl("set_.source_Storage_storage_offset", &set_strided);
    m.impl("set_.source_Storage", &set_storage);
    m.impl("set_.source_Tensor", &set_tensor);
    m.impl("set_", &set_empty);
    m.impl("is_set_to", &is_set_to);
    m.impl("_copy_from", &copy_from);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("_local_scalar_dense", &local_scalar_dense);
    m.impl("record_stream", &record_stream);
    m.impl("native_dropout", &native_dropout);
    m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
    m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
    m.impl("histc", &histc);
    m.impl("_thnn_fused_lstm_cell", &lstm_cell);
    m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
    m.impl("_thnn_fused_gru_cell", &gru_cell);
    m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

}  // namespace

PYBIND11_MODULE(_sim, m) {
    for (c10::DeviceIndex index = 0; index < kDevices; ++index) device_of_stream[default_stream(index)] = index;
    m.def("default_generator", [](int index) { return default_generator(static_cast<c10::DeviceIndex>(index)); });
    m.def("set_device_count", [](int count) { device_count = static_cast<c10::DeviceIndex>(count); });
    m.def("host_register", [](Address address, size_t nbytes) {
        awake[current_device] = true;
        machine().pin(address, nbytes, {});
    });
    m.def("is_awake", [](int index) { return awake[index].load(); });
    m.def("host_unregister", [](Address address) { machine().unpin(address, true); });
    m.def("set_memory_cap", [](size_t nbytes) { machine().set_cap(nbytes); });
    m.def("set_pool", [](int pool) { machine().set_pool(pool); });
    m.def("pools", [] { return machine().pools(); });
    m.def("set_policy", [](const std::string& policy, uint64_t seed) {
        auto kind = policy == "hold"     ? sim::Policy::kHold
                    : policy == "random" ? sim::Policy::kRandom
                                         : sim::Policy::kNow;
        machine().set_policy(kind, seed);
    });
    m.def("set_detector", [](bool on) { machine().detects = on; });
    m.def("set_clock", [](bool on, double flops, double memory, double to_device, double to_host, double launch) {
        machine().set_clock(on, {flops, memory, to_device, to_host, launch});
    });
    m.def(
        "reset",
        [] {
            machine().reset();
            for (auto& each : awake) each = false;
        },
        py::call_guard<py::gil_scoped_release>());
    m.def("problems", [] { return machine().problems(); });
    m.def("reset_counts", [] { machine().reset_counts(); });
    m.def("counts", [] {
        std::vector<std::tuple<std::string, uint64_t, std::string, uint64_t, double>> all;
        for (auto& [key, count] : machine().counts()) {
            auto& [kind, thread, where] = key;
            all.emplace_back(kind, thread, where, count.calls, count.seconds);
        }
        return all;
    });
}
