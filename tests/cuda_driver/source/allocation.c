// cuMemAlloc memory, which is shared by CUDA IPC handles, and how much memory is left.
#include "fake_cuda.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { IPC_BYTES = 64, IPC_LAZY_PEER_ACCESS = 1 };
typedef struct {
    char file[IPC_BYTES - sizeof(size_t)]; // name in the device's directory
    size_t size;
} IpcHandle;

// Where the next allocation goes: as on a device, one lies behind the other, with nothing in between. Copies that do not
// know where an allocation ends come to the next one.
static uintptr_t next_place(size_t size) {
    enum { ROOM_BYTES_LOG2 = 40 };
    static uintptr_t next;
    if (next == 0) {
        void *room = mmap(NULL, (size_t)1 << ROOM_BYTES_LOG2, PROT_NONE, MAP_PRIVATE | MAP_NORESERVE | MAP_ANONYMOUS, -1, 0);
        if (room == MAP_FAILED) return 0;
        munmap(room, (size_t)1 << ROOM_BYTES_LOG2);
        next = ((uintptr_t)room + GRANULE_BYTES - 1) / GRANULE_BYTES * GRANULE_BYTES;
    }
    uintptr_t place = next;
    next += (size + GRANULE_BYTES - 1) / GRANULE_BYTES * GRANULE_BYTES;
    return place;
}

static CUresult map_file(CUdeviceptr *address, int descriptor, size_t size, RegionKind kind, int physical) {
    void *place = mmap((void *)next_place(size), size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (place == MAP_FAILED) {
        close(descriptor);
        return refuse(CUDA_ERROR_OUT_OF_MEMORY, "the process has no room for one more mapping");
    }
    region_add((Region){.address = (uintptr_t)place,
                        .size = size,
                        .kind = kind,
                        .physical = physical,
                        .access = ACCESS_READ_WRITE,
                        .descriptor = descriptor,
                        .opened = 1});
    *address = (CUdeviceptr)(uintptr_t)place;
    return CUDA_SUCCESS;
}

static CUresult allocate(CUdeviceptr *address, size_t size) {
    if (address == NULL || size == 0)
        return refuse(CUDA_ERROR_INVALID_VALUE, "an allocation has a size and a place for its address");
    if (fault_strikes(FAULT_OUT_OF_MEMORY)) return refuse(CUDA_ERROR_OUT_OF_MEMORY, "out of memory by seed");
    int physical = device_physical(context_current()->device);
    int descriptor = device_allocate(physical, (size + GRANULE_BYTES - 1) / GRANULE_BYTES);
    if (descriptor < 0) return refuse(CUDA_ERROR_OUT_OF_MEMORY, "the device has no %zu bytes left", size);
    return map_file(address, descriptor, size, REGION_ALLOCATED, physical);
}

static void drop(Region *region) {
    // Who imported the memory and still reads it reads poison: the documents leave undefined what they would read.
    if (region->kind == REGION_ALLOCATED && settings.poison)
        memset((void *)region->address, POISON_FREED, region->size);
    munmap((void *)region->address, region->size);
    close(region->descriptor);
    region_remove(region->address);
}

static void drop_of_device(Region *region, void *physical) {
    if (region->kind != REGION_MAPPED && region->physical == *(int *)physical) drop(region);
}

void allocations_drop(int physical) { regions_each(drop_of_device, &physical); }

static CUresult release(CUdeviceptr address) {
    Region *region = region_at(address);
    if (region == NULL || region->address != address || region->kind != REGION_ALLOCATED)
        return refuse(CUDA_ERROR_INVALID_VALUE, "cuMemFree takes what cuMemAlloc gave, once");
    drop(region);
    return CUDA_SUCCESS;
}

static CUresult address_range(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    Region *region = region_at(address);
    if (region == NULL) return refuse(CUDA_ERROR_INVALID_VALUE, "no device memory is at the address");
    if (base != NULL) *base = region->address;
    if (size != NULL) *size = region->size;
    return CUDA_SUCCESS;
}

enum { POINTER_DEVICE_ORDINAL = 9 };

static CUresult pointer_attribute(int *value, int attribute, CUdeviceptr address) {
    Region *region = region_at(address);
    if (value == NULL || attribute != POINTER_DEVICE_ORDINAL)
        return refuse(CUDA_ERROR_INVALID_VALUE, "this driver knows CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL only");
    if (region == NULL) return refuse(CUDA_ERROR_INVALID_VALUE, "no device memory is at the address");
    *value = device_visible(region->physical);
    return CUDA_SUCCESS;
}

static CUresult get_handle(IpcHandle *handle, CUdeviceptr address) {
    char path[64], target[700];
    Region *region = region_at(address);
    if (handle == NULL || region == NULL || region->kind != REGION_ALLOCATED)
        return refuse(CUDA_ERROR_INVALID_VALUE, "an IPC handle is made of memory of cuMemAlloc in this process");
    if (fault_strikes(FAULT_REFUSED_EXPORT)) return refuse(CUDA_ERROR_NOT_PERMITTED, "export refused by seed");
    snprintf(path, sizeof path, "/proc/self/fd/%d", region->descriptor);
    ssize_t length = readlink(path, target, sizeof target - 1);
    if (length < 0) return refuse(CUDA_ERROR_OPERATING_SYSTEM, "the memory has no name");
    target[length] = '\0';
    memset(handle, 0, sizeof *handle);
    memcpy(handle->file, strrchr(target, '/') + 1, strnlen(strrchr(target, '/') + 1, sizeof handle->file - 1));
    handle->size = region->size;
    return CUDA_SUCCESS;
}

typedef struct {
    dev_t device;
    ino_t file;
    Region *found;
} Search;

static void same_file(Region *region, void *context) {
    Search *search = context;
    struct stat status;
    if (region->kind != REGION_MAPPED && fstat(region->descriptor, &status) == 0 && status.st_dev == search->device &&
        status.st_ino == search->file)
        search->found = region;
}

static CUresult open_handle(CUdeviceptr *address, IpcHandle handle, unsigned flags) {
    char path[700];
    int physical;
    struct stat status;
    handle.file[sizeof handle.file - 1] = '\0';
    if (address == NULL || flags != IPC_LAZY_PEER_ACCESS)
        return refuse(CUDA_ERROR_INVALID_VALUE,
                      "the flags of cuIpcOpenMemHandle are CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS");
    if (sscanf(handle.file, "memory-%d-", &physical) != 1 || strchr(handle.file, '/') != NULL)
        return refuse(CUDA_ERROR_INVALID_HANDLE, "this is no IPC handle of these devices");
    device_file_path(handle.file, path, sizeof path);
    int descriptor = open(path, O_RDWR | O_CLOEXEC);
    if (descriptor < 0) return refuse(CUDA_ERROR_MAP_FAILED, "the memory of the IPC handle was freed");
    bool is_dead = flock(descriptor, LOCK_EX | LOCK_NB) == 0; // nobody holds the memory, and no sweep came by yet
    if (is_dead || flock(descriptor, LOCK_SH) != 0 || fstat(descriptor, &status) != 0 || status.st_nlink == 0) {
        close(descriptor);
        return refuse(CUDA_ERROR_MAP_FAILED, "the memory of the IPC handle was freed");
    }
    Search search = {status.st_dev, status.st_ino, NULL};
    regions_each(same_file, &search);
    if (search.found == NULL) return map_file(address, descriptor, handle.size, REGION_IPC, physical);
    close(descriptor);
    if (search.found->kind == REGION_ALLOCATED)
        return refuse(CUDA_ERROR_INVALID_CONTEXT, "the process that exported an IPC handle cannot open it");
    search.found->opened++;
    *address = search.found->address;
    return CUDA_SUCCESS;
}

static CUresult close_handle(CUdeviceptr address) {
    Region *region = region_at(address);
    if (region == NULL || region->kind != REGION_IPC || region->address != address)
        return refuse(CUDA_ERROR_INVALID_VALUE, "cuIpcCloseMemHandle takes what cuIpcOpenMemHandle gave");
    if (--region->opened == 0) drop(region);
    return CUDA_SUCCESS;
}

static CUresult memory_info(size_t *left, size_t *total) {
    if (left == NULL || total == NULL) return refuse(CUDA_ERROR_INVALID_VALUE, "both results need a place");
    uint64_t used = device_used_granules(device_physical(context_current()->device));
    *total = settings.memory_granules * GRANULE_BYTES;
    *left = *total - used * GRANULE_BYTES;
    return CUDA_SUCCESS;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
    CALL(NEEDS_CONTEXT, allocate(address, size), NULL, "\"size\":%zu,\"address\":%llu", size,
         result_ == CUDA_SUCCESS ? *address : 0);
}
API CUresult cuMemFree_v2(CUdeviceptr address) {
    CALL(NEEDS_CONTEXT, release(address), NULL, "\"address\":%llu", address);
}
API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    CALL(NEEDS_CONTEXT, address_range(base, size, address), NULL, "\"address\":%llu", address);
}
API CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address) {
    CALL(NEEDS_INIT, pointer_attribute(value, attribute, address), NULL, "\"attribute\":%d,\"address\":%llu", attribute,
         address);
}
API CUresult cuIpcGetMemHandle(IpcHandle *handle, CUdeviceptr address) {
    CALL(NEEDS_CONTEXT, get_handle(handle, address), NULL, "\"address\":%llu", address);
}
API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, IpcHandle handle, unsigned flags) {
    CALL(NEEDS_CONTEXT, open_handle(address, handle, flags), NULL, "\"address\":%llu",
         result_ == CUDA_SUCCESS ? *address : 0);
}
API CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    CALL(NEEDS_CONTEXT, close_handle(address), NULL, "\"address\":%llu", address);
}
API CUresult cuMemGetInfo_v2(size_t *left, size_t *total) {
    CALL(NEEDS_CONTEXT, memory_info(left, total), NULL, "\"free\":%zu", result_ == CUDA_SUCCESS ? *left : 0);
}
