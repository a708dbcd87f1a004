// Compares device/driver.h and driver.def with the headers of CUDA; nothing to run: it compiles if all agree.
//
// cudaTypedefs.h has a type for each function in each of its versions, so that a wrong version number in the table is
// found too.
#include <cuda.h>
#include <cudaTypedefs.h>

#include "device/driver.h"
#include "signatures.h"

using ringtrain::Driver;

static_assert(CUDA_SUCCESS == ringtrain::kCudaSuccess && CUDA_ERROR_NOT_READY == ringtrain::kCudaNotReady, "CUresult");
static_assert(CU_STREAM_NON_BLOCKING == ringtrain::kCudaStreamNonBlocking, "CU_STREAM_NON_BLOCKING");
static_assert(CU_EVENT_DISABLE_TIMING == ringtrain::kCudaEventDisableTiming, "CU_EVENT_DISABLE_TIMING");
static_assert(CU_MEMHOSTALLOC_PORTABLE == ringtrain::kCudaHostPortable, "CU_MEMHOSTALLOC_PORTABLE");
static_assert(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR == ringtrain::kCudaAttributeComputeMajor,
              "compute capability");
static_assert(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR == ringtrain::kCudaAttributeComputeMinor,
              "compute capability");
static_assert(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID == ringtrain::kCudaAttributePciBus, "PCI bus");
static_assert(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID == ringtrain::kCudaAttributePciDevice, "PCI device");
static_assert(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID == ringtrain::kCudaAttributePciDomain, "PCI domain");
static_assert(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL == ringtrain::kCudaPointerDeviceOrdinal, "device ordinal");

#define RT_CUDA(name, version, parameters) \
  static_assert(SameSignature(PFN_cu##name##_v##version(nullptr), decltype(Driver::name)(nullptr)), "cu" #name);
#include "device/driver.def"
#undef RT_CUDA

int main() { return 0; }
