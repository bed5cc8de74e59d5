// What a device says of itself.
#include "fake_cuda.h"

#include <stdio.h>
#include <string.h>

typedef struct {
    unsigned char bytes[16];
} Uuid;

enum { HOST_NUMA_ID = 134, HOST_NUMA_ID_SINCE = 12020, MAX_ATTRIBUTE = 147 };

static int attribute(int which, int physical) {
    switch (which) {
    case 1:
        return 1024; // MAX_THREADS_PER_BLOCK
    case 10:
        return 32; // WARP_SIZE
    case 11:
        return MAX_PITCH;
    case 15:
    case 31:
        return 1; // GPU_OVERLAP, CONCURRENT_KERNELS
    case 16:
        return 132; // MULTIPROCESSOR_COUNT
    case 20:
        return settings.compute_mode; // COMPUTE_MODE
    case 33:
        return physical + 1; // PCI_BUS_ID
    case 40:
        return 3; // ASYNC_ENGINE_COUNT: both directions at once, and peers
    case 41:
        return 1; // UNIFIED_ADDRESSING
    case 75:
        return 9; // COMPUTE_CAPABILITY_MAJOR
    case 91:
        return 1; // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    case 99:
        return 1; // HOST_REGISTER_SUPPORTED
    case 102:
    case 103:
        return 1; // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    case 113:
        return 1; // READ_ONLY_HOST_REGISTER_SUPPORTED
    case 122:
    case 123:
        return 1; // CAN_USE_64_BIT_STREAM_MEM_OPS, CAN_USE_STREAM_WAIT_VALUE_NOR
    case 125:
        return 1; // IPC_EVENT_SUPPORTED
    case 131:
        return -1; // NUMA_ID: the device's memory is no node of its own
    case HOST_NUMA_ID:
        return physical;
    default:
        return 0; // fabric handles, managed memory, memory pools: not here
    }
}

static CUresult give_attribute(int *value, int which, CUdevice device) {
    bool is_unknown = which == HOST_NUMA_ID && settings.version < HOST_NUMA_ID_SINCE;
    if (value == NULL || which < 1 || which > MAX_ATTRIBUTE || is_unknown)
        return refuse(CUDA_ERROR_INVALID_VALUE, "there is no attribute %d", which);
    if (!device_valid(device)) return refuse(CUDA_ERROR_INVALID_DEVICE, "this process sees no device %d", device);
    *value = attribute(which, device_physical(device));
    return CUDA_SUCCESS;
}

static CUresult give_device(CUdevice *device, int ordinal) {
    if (device == NULL) return refuse(CUDA_ERROR_INVALID_VALUE, "the device needs a place");
    if (!device_valid(ordinal)) return refuse(CUDA_ERROR_INVALID_DEVICE, "this process sees no device %d", ordinal);
    *device = ordinal;
    return CUDA_SUCCESS;
}

static CUresult give_count(int *count) {
    if (count == NULL) return refuse(CUDA_ERROR_INVALID_VALUE, "the count needs a place");
    *count = 0;
    while (device_valid(*count)) ++*count;
    return CUDA_SUCCESS;
}

static CUresult give_name(char *name, int room, CUdevice device) {
    if (name == NULL || room <= 0) return refuse(CUDA_ERROR_INVALID_VALUE, "the name needs a place");
    if (!device_valid(device)) return refuse(CUDA_ERROR_INVALID_DEVICE, "this process sees no device %d", device);
    snprintf(name, (size_t)room, "Fake CUDA device %d", device_physical(device));
    return CUDA_SUCCESS;
}

// Of the physical device and of its directory: equal in every process, whatever number the device has there.
static CUresult give_uuid(Uuid *uuid, CUdevice device) {
    if (uuid == NULL) return refuse(CUDA_ERROR_INVALID_VALUE, "the UUID needs a place");
    if (!device_valid(device)) return refuse(CUDA_ERROR_INVALID_DEVICE, "this process sees no device %d", device);
    uint64_t hash = 0xCBF29CE484222325u; // FNV-1a
    for (const char *at = settings.directory; *at != '\0'; at++) hash = (hash ^ (unsigned char)*at) * 0x100000001B3u;
    memcpy(uuid->bytes, &hash, 8);
    memcpy(uuid->bytes + 8, "fakecuda", 8);
    uuid->bytes[8] = (unsigned char)device_physical(device);
    return CUDA_SUCCESS;
}

static CUresult give_total(size_t *bytes, CUdevice device) {
    if (bytes == NULL) return refuse(CUDA_ERROR_INVALID_VALUE, "the size needs a place");
    if (!device_valid(device)) return refuse(CUDA_ERROR_INVALID_DEVICE, "this process sees no device %d", device);
    *bytes = settings.memory_granules * GRANULE_BYTES;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    CALL(NEEDS_INIT, give_device(device, ordinal), NULL, "\"ordinal\":%d", ordinal);
}
API CUresult cuDeviceGetCount(int *count) { CALL(NEEDS_INIT, give_count(count), NULL, "%s", ""); }
API CUresult cuDeviceGetName(char *name, int room, CUdevice device) {
    CALL(NEEDS_INIT, give_name(name, room, device), NULL, "\"device\":%d", device);
}
API CUresult cuDeviceGetUuid(Uuid *uuid, CUdevice device) {
    CALL(NEEDS_INIT, give_uuid(uuid, device), NULL, "\"device\":%d", device);
}
API CUresult cuDeviceGetUuid_v2(Uuid *uuid, CUdevice device) {
    CALL(NEEDS_INIT, give_uuid(uuid, device), NULL, "\"device\":%d", device);
}
API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    CALL(NEEDS_INIT, give_total(bytes, device), NULL, "\"device\":%d", device);
}
API CUresult cuDeviceGetAttribute(int *value, int which, CUdevice device) {
    CALL(NEEDS_INIT, give_attribute(value, which, device), NULL, "\"attribute\":%d,\"device\":%d", which, device);
}
