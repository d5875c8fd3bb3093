#pragma once

// The memory of torch tensors. A tensor with an address may have no memory: its storage may have
// been freed or made smaller, or it may stand for the values of other tensors.

#include <dlpack/dlpack.h>
#include <nanobind/nanobind.h>

#include <memory>

#include "bind/tensor_kinds.h"

namespace moolink::bind {

namespace nb = nanobind;

// The same memory as a tensor of torch's own class, outside of autograd; the tensor itself if its
// class is torch's own.
nb::object plain_torch(nb::object tensor, Importer importer);

// The storage that holds the elements of a torch tensor of torch's own class. It keeps the memory
// if the tensor gets another storage. Raises TypeError with the type's name and the remedy if there
// is none: for tensors on the meta device, of other layouts than strided, nested, in a transform of
// torch.func, or with a storage that was freed.
nb::object torch_storage(nb::handle tensor);

// DLPack's description of the same tensor. Raises TypeError unless its elements lie in the storage.
DLTensor torch_description(nb::handle tensor, const DLPackExchangeAPI* api, nb::handle storage);

}  // namespace moolink::bind
