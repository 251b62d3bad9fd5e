// Sparse tensors: indices and values lie on the device, and the operators run on copies in host memory.
#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <torch/library.h>

namespace {

bool is_sim(c10::Device device) { return device.type() == c10::DeviceType::PrivateUse1; }

// A new sparse tensor lies on the device that is the current one.
at::Tensor with_dims(int64_t sparse, int64_t dense, c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout> layout, std::optional<c10::Device> on, std::optional<bool> pin) {
    c10::OptionalDeviceGuard guard(on);
    return at::native::new_with_dims_sparse(sparse, dense, size, dtype, layout, on, pin);
}

at::Tensor with_tensors(int64_t sparse, int64_t dense, c10::SymIntArrayRef size, const at::Tensor& indices,
                        const at::Tensor& values, std::optional<c10::ScalarType> dtype,
                        std::optional<c10::Layout> layout, std::optional<c10::Device> on, std::optional<bool> pin,
                        std::optional<bool> coalesced) {
    c10::DeviceGuard guard(values.device());
    return at::native::new_with_dims_and_tensor_sparse_symint(sparse, dense, size, indices, values, dtype, layout, on,
                                                              pin, coalesced);
}

at::Tensor moved(const at::Tensor& tensor, c10::Device to) {
    if (!tensor.is_sparse()) return tensor.to(to);
    auto values = tensor._values().to(to);
    return at::_sparse_coo_tensor_unsafe(tensor._indices().to(to), values, tensor.sizes(),
                                         values.options().layout(at::kSparse), tensor.is_coalesced());
}

void put_back(const at::Tensor& into, const at::Tensor& result) {
    if (!into.is_sparse()) {
        into.copy_(result);
        return;
    }
    auto* impl = at::sparse::get_sparse_impl(into);
    at::Tensor fresh = moved(result, into.device());
    impl->set_indices_and_values_unsafe(fresh._indices(), fresh._values());
    impl->set_coalesced(result.is_coalesced());
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const auto& schema = op.schema();
    const auto first = stack->size() - schema.arguments().size();
    c10::Device home(c10::DeviceType::PrivateUse1);
    std::vector<std::pair<at::Tensor, at::Tensor>> written;  // (on the device, its copy)
    for (size_t at = 0; at < schema.arguments().size(); ++at) {
        c10::IValue& value = (*stack)[first + at];
        auto* alias = schema.arguments()[at].alias_info();
        if (value.isTensor() && value.toTensor().defined() && is_sim(value.toTensor().device())) {
            home = value.toTensor().device();
            at::Tensor copy = moved(value.toTensor(), c10::kCPU);
            if (alias && alias->isWrite()) written.emplace_back(value.toTensor(), copy);
            value = copy;
        } else if (value.isDevice()) {
            home = value.toDevice();
            value = c10::Device(c10::kCPU);
        }
    }
    op.callBoxed(stack);
    for (auto& [there, copy] : written) put_back(there, copy);
    for (size_t at = stack->size() - schema.returns().size(); at < stack->size(); ++at) {
        c10::IValue& value = (*stack)[at];
        if (!value.isTensor() || !value.toTensor().defined()) continue;
        auto same = [&](const auto& pair) { return pair.second.is_same(value.toTensor()); };
        auto found = std::find_if(written.begin(), written.end(), same);
        auto* alias = schema.returns()[at + schema.returns().size() - stack->size()].alias_info();
        if (found != written.end())
            value = found->first;
        else if (is_sim(home) && !(alias && alias->isWrite()))
            value = moved(value.toTensor(), home);
    }
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
    m.impl("_sparse_coo_tensor_with_dims", &with_dims);
    m.impl("_sparse_coo_tensor_with_dims_and_tensors", &with_tensors);
    m.impl("_indices", &at::native::_indices_sparse);
    m.impl("_values", &at::native::_values_sparse);
    m.impl("indices", &at::native::indices_sparse);
    m.impl("values", &at::native::values_sparse);
    m.impl("_nnz", &at::native::_nnz_sparse);
    m.impl("is_coalesced", &at::native::is_coalesced_sparse);
    m.impl("_coalesced_", &at::native::_coalesced_sparse_);
    m.impl("sparse_dim", &at::native::sparse_dim_sparse);
    m.impl("dense_dim", &at::native::dense_dim_sparse);
    for (auto* name : {"clone", "copy_", "empty_like", "zero_", "add.Tensor", "add_.Tensor", "add.out", "mul.Tensor",
                       "mul_.Tensor", "div.Tensor", "div_.Tensor", "neg", "sparse_mask", "_coalesce"})
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());  // torch has one for all other devices
}

}  // namespace
