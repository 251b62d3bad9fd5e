// The only file that knows Python: addresses come as ints, errors leave as exceptions, the GIL is released for work.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <stdexcept>
#include <system_error>

#include "native.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace outsize {

namespace {

using Release = nb::call_guard<nb::gil_scoped_release>;

template <class T>
T* pointer(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

template <class T>
T* required(std::uintptr_t address, std::size_t numel, const char* name) {
    if (address == 0 && numel > 0) throw std::invalid_argument(std::string(name) + " is a null address");
    return pointer<T>(address);
}

DType dtype_of(int code, const char* name) {
    if (code < 0 || code > 2)
        throw std::invalid_argument(std::string(name) + " is " + std::to_string(code) +
                                    "; it must be FLOAT32, BFLOAT16 or FLOAT16");
    return static_cast<DType>(code);
}

Operation operation_of(const std::string& name) {
    if (name == "read") return Operation::kRead;
    if (name == "write") return Operation::kWrite;
    throw std::invalid_argument("op is '" + name + "'; it must be 'read' or 'write'");
}

DType weight_dtype_of(int code, std::uintptr_t master) {
    const DType dtype = dtype_of(code, "param_dtype");
    if (dtype == DType::kFloat32 && master != 0)
        throw std::invalid_argument("master is given, but a FLOAT32 param is its own master");
    if (dtype == DType::kBFloat16 && master == 0)
        throw std::invalid_argument("master is a null address; a BFLOAT16 param needs its int16 remainder");
    if (dtype == DType::kFloat16 && master == 0)
        throw std::invalid_argument("master is a null address; a FLOAT16 param needs its fp32 master");
    return dtype;
}

template <class T>
std::vector<T*> addresses(const std::vector<std::uintptr_t>& given, std::size_t numel, const char* name) {
    std::vector<T*> all;
    for (std::size_t i = 0; i < given.size(); ++i)
        all.push_back(required<T>(given[i], numel, (std::string(name) + "[" + std::to_string(i) + "]").c_str()));
    return all;
}

Arrays arrays_of(std::uintptr_t param, int param_dtype, std::uintptr_t master, std::uintptr_t grad, int grad_dtype,
                 const std::vector<std::uintptr_t>& states, const std::vector<std::uintptr_t>& scales,
                 std::size_t numel, double grad_scale, double clamp_min, double clamp_max) {
    if (!scales.empty() && scales.size() != states.size())
        throw std::invalid_argument("scales has " + std::to_string(scales.size()) + " addresses for " +
                                    std::to_string(states.size()) + " states; it must have one for each, or none");
    return {.param = required<void>(param, numel, "param"),
            .param_dtype = numel > 0 ? weight_dtype_of(param_dtype, master) : dtype_of(param_dtype, "param_dtype"),
            .master = pointer<void>(master),
            .grad = required<void>(grad, numel, "grad"),
            .grad_dtype = dtype_of(grad_dtype, "grad_dtype"),
            .states = addresses<void>(states, numel, "states"),
            .scales = addresses<float>(scales, numel, "scales"),
            .numel = numel,
            .grad_scale = static_cast<float>(grad_scale),
            .clamp_min = static_cast<float>(clamp_min),
            .clamp_max = static_cast<float>(clamp_max)};
}

void expect_states(const Arrays& arrays, std::size_t count, const char* names) {
    if (arrays.states.size() != count)
        throw std::invalid_argument("states has " + std::to_string(arrays.states.size()) + " addresses; it must have " +
                                    std::to_string(count) + " (" + names + ")");
}

void expect_step(std::int64_t step) {
    if (step < 1) throw std::invalid_argument("step is " + std::to_string(step) + "; it counts from 1");
}

void expect_threads(int threads) {
    if (threads < 1 || threads > 1024)
        throw std::invalid_argument("threads is " + std::to_string(threads) + "; it must be from 1 to 1024");
}

void expect_positive(std::size_t value, const char* name) {
    if (value == 0) throw std::invalid_argument(std::string(name) + " is 0; it must be at least 1");
}

void expect_last_page(std::size_t count, std::size_t page_bytes, std::size_t last_bytes) {
    if (count > 0 && (last_bytes == 0 || last_bytes > page_bytes))
        throw std::invalid_argument("last_bytes is " + std::to_string(last_bytes) + "; it must be from 1 to " +
                                    std::to_string(page_bytes) + " (page_bytes)");
}

void bind_disk(nb::module_& m) {
    nb::class_<DiskEngine>(m, "DiskEngine")
        .def(
            "__init__",
            [](DiskEngine* self, std::string backend, unsigned depth, int threads, std::size_t request_bytes) {
                new (self) DiskEngine(std::move(backend), {depth, threads, request_bytes});
            },
            "backend"_a, "depth"_a = DiskOptions{}.depth, "threads"_a = DiskOptions{}.threads,
            "request_bytes"_a = DiskOptions{}.request_bytes)
        .def_prop_ro("backend", &DiskEngine::backend)
        .def_prop_ro("bytes_read", &DiskEngine::bytes_read)
        .def_prop_ro("bytes_written", &DiskEngine::bytes_written)
        .def_prop_ro("requests", &DiskEngine::requests)
        .def(
            "read",
            [](DiskEngine& self, int fd, std::uint64_t offset, std::uintptr_t address, std::size_t nbytes) {
                return self.start(Operation::kRead, fd, offset, required<char>(address, nbytes, "address"), nbytes);
            },
            "fd"_a, "offset"_a, "address"_a, "nbytes"_a, Release())
        .def(
            "write",
            [](DiskEngine& self, int fd, std::uint64_t offset, std::uintptr_t address, std::size_t nbytes) {
                return self.start(Operation::kWrite, fd, offset, required<char>(address, nbytes, "address"), nbytes);
            },
            "fd"_a, "offset"_a, "address"_a, "nbytes"_a, Release())
        .def(
            "read_pages",
            [](DiskEngine& self, int fd, std::uintptr_t pages, std::size_t count, std::uintptr_t address) {
                return self.start_pages(Operation::kRead, fd, required<const std::int64_t>(pages, count, "pages"),
                                        count, required<char>(address, count * kBlockBytes, "address"));
            },
            "fd"_a, "pages"_a, "count"_a, "address"_a, Release())
        .def(
            "write_pages",
            [](DiskEngine& self, int fd, std::uintptr_t pages, std::size_t count, std::uintptr_t address) {
                return self.start_pages(Operation::kWrite, fd, required<const std::int64_t>(pages, count, "pages"),
                                        count, required<char>(address, count * kBlockBytes, "address"));
            },
            "fd"_a, "pages"_a, "count"_a, "address"_a, Release())
        .def("wait", &DiskEngine::wait, "ticket"_a, Release())
        .def("done", &DiskEngine::done, "ticket"_a, Release())
        .def(
            "inject",
            [](DiskEngine& self, const std::string& op, std::uint64_t nth, int error, std::int64_t short_bytes) {
                self.inject(operation_of(op), nth, error, short_bytes);
            },
            "op"_a, "nth"_a, "error"_a = 0, "short_bytes"_a = -1)
        .def("close", &DiskEngine::close, Release());
    m.def("probe_uring", &probe_uring, Release());
}

void bind_updates(nb::module_& m) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    nb::class_<Arrays>(m, "Arrays")
        .def(nb::new_(&arrays_of), nb::kw_only(), "param"_a, "param_dtype"_a, "master"_a, "grad"_a, "grad_dtype"_a,
             "states"_a, "scales"_a, "numel"_a, "grad_scale"_a = 1.0, "clamp_min"_a = -kInfinity,
             "clamp_max"_a = kInfinity);
    m.def(
        "adam",
        [](const Arrays& arrays, double lr, double beta1, double beta2, double eps, double weight_decay, bool decoupled,
           bool maximize, bool amsgrad, std::int64_t step, int threads) {
            if (amsgrad)
                expect_states(arrays, 3, "exp_avg, exp_avg_sq, max_exp_avg_sq");
            else
                expect_states(arrays, 2, "exp_avg, exp_avg_sq");
            expect_step(step);
            expect_threads(threads);
            adam(arrays, {lr, beta1, beta2, eps, weight_decay, decoupled, maximize, amsgrad, step}, threads);
        },
        "arrays"_a, nb::kw_only(), "lr"_a, "beta1"_a, "beta2"_a, "eps"_a, "weight_decay"_a, "decoupled"_a, "maximize"_a,
        "amsgrad"_a, "step"_a, "threads"_a = 1, Release());
    m.def(
        "sgd",
        [](const Arrays& arrays, double lr, double momentum, double dampening, double weight_decay, bool nesterov,
           bool maximize, bool first, int threads) {
            if (momentum != 0)
                expect_states(arrays, 1, "momentum_buffer");
            else
                expect_states(arrays, 0, "without momentum");
            expect_threads(threads);
            sgd(arrays, {lr, momentum, dampening, weight_decay, nesterov, maximize, first}, threads);
        },
        "arrays"_a, nb::kw_only(), "lr"_a, "momentum"_a, "dampening"_a, "weight_decay"_a, "nesterov"_a, "maximize"_a,
        "first"_a, "threads"_a = 1, Release());
    m.def(
        "adagrad",
        [](const Arrays& arrays, double lr, double lr_decay, double eps, double weight_decay, bool maximize,
           std::int64_t step, int threads) {
            expect_states(arrays, 1, "sum");
            expect_step(step);
            expect_threads(threads);
            adagrad(arrays, {lr, lr_decay, eps, weight_decay, maximize, step}, threads);
        },
        "arrays"_a, nb::kw_only(), "lr"_a, "lr_decay"_a, "eps"_a, "weight_decay"_a, "maximize"_a, "step"_a,
        "threads"_a = 1, Release());
    m.def(
        "lion",
        [](const Arrays& arrays, double lr, double beta1, double beta2, double weight_decay, bool maximize,
           int threads) {
            expect_states(arrays, 1, "exp_avg");
            expect_threads(threads);
            lion(arrays, {lr, beta1, beta2, weight_decay, maximize}, threads);
        },
        "arrays"_a, nb::kw_only(), "lr"_a, "beta1"_a, "beta2"_a, "weight_decay"_a, "maximize"_a, "threads"_a = 1,
        Release());
}

void bind_kernels(nb::module_& m) {
    m.attr("FLOAT32") = static_cast<int>(DType::kFloat32);
    m.attr("BFLOAT16") = static_cast<int>(DType::kBFloat16);
    m.attr("FLOAT16") = static_cast<int>(DType::kFloat16);
    m.def("instruction_set", &instruction_set);
    m.def("instruction_sets", &instruction_sets);
    m.def("use_instruction_set", &use_instruction_set, "name"_a);
    m.def(
        "squared_norm",
        [](std::uintptr_t address, int dtype, std::size_t numel, int threads) {
            expect_threads(threads);
            return squared_norm(required<void>(address, numel, "address"), dtype_of(dtype, "dtype"), numel, threads);
        },
        "address"_a, "dtype"_a, "numel"_a, "threads"_a = 1, Release());
    m.def(
        "accumulate",
        [](std::uintptr_t dst, std::uintptr_t src, int src_dtype, std::size_t numel, double scale, int threads) {
            expect_threads(threads);
            accumulate(required<float>(dst, numel, "dst"), required<void>(src, numel, "src"),
                       dtype_of(src_dtype, "src_dtype"), numel, static_cast<float>(scale), threads);
        },
        "dst"_a, "src"_a, "src_dtype"_a, "numel"_a, "scale"_a = 1.0, "threads"_a = 1, Release());
    m.def(
        "copy",
        [](std::uintptr_t dst, std::uintptr_t src, std::size_t nbytes, int threads) {
            expect_threads(threads);
            copy(required<void>(dst, nbytes, "dst"), required<void>(src, nbytes, "src"), nbytes, threads);
        },
        "dst"_a, "src"_a, "nbytes"_a, "threads"_a = 1, Release());
    m.def(
        "split_master",
        [](std::uintptr_t master, std::uintptr_t bf16, std::uintptr_t remainder, std::size_t numel) {
            split_master(required<float>(master, numel, "master"), required<std::uint16_t>(bf16, numel, "bf16"),
                         required<std::int16_t>(remainder, numel, "remainder"), numel);
        },
        "master"_a, "bf16"_a, "remainder"_a, "numel"_a, Release());
    m.def(
        "join_master",
        [](std::uintptr_t bf16, std::uintptr_t remainder, std::uintptr_t master, std::size_t numel) {
            join_master(required<std::uint16_t>(bf16, numel, "bf16"),
                        required<std::int16_t>(remainder, numel, "remainder"), required<float>(master, numel, "master"),
                        numel);
        },
        "bf16"_a, "remainder"_a, "master"_a, "numel"_a, Release());
    m.def(
        "encode",
        [](std::uintptr_t values, std::uintptr_t codes, std::uintptr_t scales, std::size_t numel, bool root) {
            encode(required<float>(values, numel, "values"), required<void>(codes, numel, "codes"),
                   required<float>(scales, numel, "scales"), numel, root);
        },
        "values"_a, "codes"_a, "scales"_a, "numel"_a, "root"_a, Release());
    m.def(
        "decode",
        [](std::uintptr_t codes, std::uintptr_t scales, std::uintptr_t values, std::size_t numel, bool root) {
            decode(required<void>(codes, numel, "codes"), required<float>(scales, numel, "scales"),
                   required<float>(values, numel, "values"), numel, root);
        },
        "codes"_a, "scales"_a, "values"_a, "numel"_a, "root"_a, Release());
}

void bind_checksums(nb::module_& m) {
    m.def(
        "page_sums",
        [](std::uintptr_t address, std::size_t nbytes, std::size_t page_bytes, std::uintptr_t sums) {
            expect_positive(page_bytes, "page_bytes");
            page_sums(required<void>(address, nbytes, "address"), nbytes, page_bytes,
                      required<std::uint32_t>(sums, nbytes, "sums"));
        },
        "address"_a, "nbytes"_a, "page_bytes"_a, "sums"_a, Release());
    m.def(
        "join_sums",
        [](std::uintptr_t sums, std::size_t count, std::size_t page_bytes, std::size_t last_bytes, std::size_t group,
           std::uintptr_t out) {
            expect_positive(page_bytes, "page_bytes");
            expect_positive(group, "group");
            expect_last_page(count, page_bytes, last_bytes);
            join_sums(required<std::uint32_t>(sums, count, "sums"), count, page_bytes, last_bytes, group,
                      required<std::uint32_t>(out, count, "out"));
        },
        "sums"_a, "count"_a, "page_bytes"_a, "last_bytes"_a, "group"_a, "out"_a, Release());
}

}  // namespace

}  // namespace outsize

NB_MODULE(_native, m) {
    // An engine that is alive at interpreter exit (a store held by a module global) is no bug.
    nb::set_leak_warnings(false);
    nb::register_exception_translator([](const std::exception_ptr& raised, void*) {
        try {
            std::rethrow_exception(raised);
        } catch (const std::system_error& error) {
            const nb::tuple args = nb::make_tuple(error.code().value(), error.what());
            PyErr_SetObject(PyExc_OSError, args.ptr());
        }
    });
    outsize::bind_disk(m);
    outsize::bind_kernels(m);
    outsize::bind_updates(m);
    outsize::bind_checksums(m);
}
