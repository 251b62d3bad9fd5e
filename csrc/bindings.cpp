// The only file that knows Python: addresses come as ints, errors leave as exceptions, the GIL is released for work.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <limits>
#include <stdexcept>
#include <system_error>

#include "native.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace outsize {

namespace {

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

void update_adamw(std::uintptr_t param, int param_dtype, std::uintptr_t remainder, std::uintptr_t exp_avg,
                  std::uintptr_t exp_avg_sq, std::uintptr_t grad, int grad_dtype, std::size_t numel, double lr,
                  double beta1, double beta2, double eps, double weight_decay, bool decoupled, bool maximize,
                  std::int64_t step, double grad_scale, double clamp_min, double clamp_max,
                  std::uintptr_t max_exp_avg_sq, int threads) {
    const DType param_format = dtype_of(param_dtype, "param_dtype");
    const bool split = remainder != 0;
    if (param_format != (split ? DType::kBFloat16 : DType::kFloat32) && numel > 0)
        throw std::invalid_argument("param must be FLOAT32 without a remainder, or BFLOAT16 with one");
    if (step < 1) throw std::invalid_argument("step is " + std::to_string(step) + "; it counts from 1");
    if (threads < 1 || threads > 1024)
        throw std::invalid_argument("threads is " + std::to_string(threads) + "; it must be from 1 to 1024");
    const AdamWArrays arrays{.param = required<void>(param, numel, "param"),
                             .remainder = pointer<std::int16_t>(remainder),
                             .exp_avg = required<float>(exp_avg, numel, "exp_avg"),
                             .exp_avg_sq = required<float>(exp_avg_sq, numel, "exp_avg_sq"),
                             .max_exp_avg_sq = pointer<float>(max_exp_avg_sq),
                             .grad = required<void>(grad, numel, "grad"),
                             .grad_dtype = dtype_of(grad_dtype, "grad_dtype"),
                             .numel = numel};
    const AdamW options{.lr = lr,
                        .beta1 = beta1,
                        .beta2 = beta2,
                        .eps = eps,
                        .weight_decay = weight_decay,
                        .decoupled = decoupled,
                        .maximize = maximize,
                        .step = step,
                        .grad_scale = grad_scale,
                        .clamp_min = clamp_min,
                        .clamp_max = clamp_max};
    const nb::gil_scoped_release release;
    adamw(arrays, options, threads);
}

void bind_disk(nb::module_& m) {
    using Release = nb::call_guard<nb::gil_scoped_release>;
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

void bind_kernels(nb::module_& m) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    m.attr("FLOAT32") = static_cast<int>(DType::kFloat32);
    m.attr("BFLOAT16") = static_cast<int>(DType::kBFloat16);
    m.attr("FLOAT16") = static_cast<int>(DType::kFloat16);
    m.def("adamw", &update_adamw, "param"_a, "param_dtype"_a, "remainder"_a, "exp_avg"_a, "exp_avg_sq"_a, "grad"_a,
          "grad_dtype"_a, "numel"_a, nb::kw_only(), "lr"_a, "beta1"_a, "beta2"_a, "eps"_a, "weight_decay"_a,
          "decoupled"_a, "maximize"_a, "step"_a, "grad_scale"_a = 1.0, "clamp_min"_a = -kInfinity,
          "clamp_max"_a = kInfinity, "max_exp_avg_sq"_a = 0, "threads"_a = 1);
    m.def(
        "squared_norm",
        [](std::uintptr_t address, int dtype, std::size_t numel) {
            return squared_norm(required<void>(address, numel, "address"), dtype_of(dtype, "dtype"), numel);
        },
        "address"_a, "dtype"_a, "numel"_a, nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "accumulate",
        [](std::uintptr_t dst, std::uintptr_t src, int src_dtype, std::size_t numel, double scale) {
            accumulate(required<float>(dst, numel, "dst"), required<void>(src, numel, "src"),
                       dtype_of(src_dtype, "src_dtype"), numel, static_cast<float>(scale));
        },
        "dst"_a, "src"_a, "src_dtype"_a, "numel"_a, "scale"_a = 1.0, nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "split_master",
        [](std::uintptr_t master, std::uintptr_t bf16, std::uintptr_t remainder, std::size_t numel) {
            split_master(required<float>(master, numel, "master"), required<std::uint16_t>(bf16, numel, "bf16"),
                         required<std::int16_t>(remainder, numel, "remainder"), numel);
        },
        "master"_a, "bf16"_a, "remainder"_a, "numel"_a, nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "join_master",
        [](std::uintptr_t bf16, std::uintptr_t remainder, std::uintptr_t master, std::size_t numel) {
            join_master(required<std::uint16_t>(bf16, numel, "bf16"),
                        required<std::int16_t>(remainder, numel, "remainder"), required<float>(master, numel, "master"),
                        numel);
        },
        "bf16"_a, "remainder"_a, "master"_a, "numel"_a, nb::call_guard<nb::gil_scoped_release>());
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
            const nb::tuple args = nb::make_tuple(error.code().value(), error.code().message());
            PyErr_SetObject(PyExc_OSError, args.ptr());
        }
    });
    outsize::bind_disk(m);
    outsize::bind_kernels(m);
}
