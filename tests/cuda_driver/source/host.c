// Host memory that the device may reach: registered or allocated.
#include "fake_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { PORTABLE = 1, DEVICE_MAP = 2, IO_MEMORY = 4, READ_ONLY = 8 };
#define LARGEST_REGISTRATION ((size_t)512 << 30) // drivers from r580 on refuse one call of so much

static bool is_mapped(uintptr_t address, size_t size) {
    uintptr_t first = address / PAGE_BYTES * PAGE_BYTES;
    enum { PAGES = 4096 };
    unsigned char present[PAGES];
    for (uintptr_t at = first; at < address + size; at += PAGES * PAGE_BYTES) {
        size_t rest = address + size - at;
        if (mincore((void *)at, rest < PAGES * PAGE_BYTES ? rest : PAGES * PAGE_BYTES, present) != 0) return false;
    }
    return true;
}

// Without READ_ONLY the driver pins pages to write them.
static bool is_writable(uintptr_t address, size_t size) {
    FILE *maps = fopen("/proc/self/maps", "r");
    if (maps == NULL) return true;
    char line[512];
    bool all = true;
    while (all && fgets(line, sizeof line, maps) != NULL) {
        uintptr_t first, end;
        char mode[5];
        if (sscanf(line, "%lx-%lx %4s", &first, &end, mode) == 3 && first < address + size && end > address)
            all = mode[1] == 'w';
    }
    fclose(maps);
    return all;
}

static CUresult add(uintptr_t address, size_t size, unsigned flags) {
    if (reservation_touches(address, size) || region_at(address) != NULL)
        return refuse(CUDA_ERROR_INVALID_VALUE, "device memory cannot be registered as host memory");
    if (host_region_add((HostRegion){.address = address, .size = size, .flags = flags}) == NULL)
        return refuse(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "a page of the range is registered already");
    return CUDA_SUCCESS;
}

static CUresult enlist(void *start, size_t size, unsigned flags) {
    uintptr_t address = (uintptr_t)start;
    if (size == 0 || address == 0 || address + size < address)
        return refuse(CUDA_ERROR_INVALID_VALUE, "the range is empty or wraps");
    if (flags & ~(unsigned)(PORTABLE | DEVICE_MAP | READ_ONLY))
        return refuse(CUDA_ERROR_INVALID_VALUE, "these flags are not known here");
    if (size >= LARGEST_REGISTRATION)
        return refuse(CUDA_ERROR_INVALID_VALUE, "one registration of 512 GiB or more fails: register in pieces");
    if (!is_mapped(address, size)) return refuse(CUDA_ERROR_INVALID_VALUE, "a part of the range is not mapped");
    if (!(flags & READ_ONLY) && !is_writable(address, size))
        return refuse(CUDA_ERROR_INVALID_VALUE, "memory that is mapped read-only is registered with READ_ONLY");
    if (fault_strikes(FAULT_REFUSED_REGISTRATION))
        return refuse(CUDA_ERROR_OUT_OF_MEMORY, "registration refused by seed");
    return add(address, size, flags);
}

// Pinning takes time, and other calls of this kind wait for it, in this process at least.
static void pay(size_t size) {
    static pthread_mutex_t pinning = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&pinning);
    nap_us(settings.register_us_per_mib * (size >> 20));
    pthread_mutex_unlock(&pinning);
}

static CUresult strike_off(void *start) {
    HostRegion *region = host_region_at((uintptr_t)start);
    if (region == NULL || region->address != (uintptr_t)start || region->owned)
        return refuse(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
                      "cuMemHostUnregister takes the address that was registered");
    host_region_remove(region->address);
    return CUDA_SUCCESS;
}

static CUresult device_pointer(CUdeviceptr *address, void *start, unsigned flags) {
    HostRegion *region = host_region_at((uintptr_t)start);
    if (address == NULL || flags != 0)
        return refuse(CUDA_ERROR_INVALID_VALUE, "the flags are 0, and the address needs a place");
    if (region == NULL) return refuse(CUDA_ERROR_INVALID_VALUE, "the memory is not registered");
    if (!(region->flags & DEVICE_MAP))
        return refuse(CUDA_ERROR_INVALID_VALUE, "the memory was registered without DEVICEMAP");
    *address = (CUdeviceptr)(uintptr_t)start;
    return CUDA_SUCCESS;
}

static CUresult give_flags(unsigned *flags, void *start) {
    HostRegion *region = host_region_at((uintptr_t)start);
    if (flags == NULL || region == NULL) return refuse(CUDA_ERROR_INVALID_VALUE, "the memory is not registered");
    *flags = region->flags;
    return CUDA_SUCCESS;
}

static CUresult allocate(void **start, size_t size, unsigned flags) {
    if (start == NULL || size == 0)
        return refuse(CUDA_ERROR_INVALID_VALUE, "an allocation has a size and a place for its address");
    if (fault_strikes(FAULT_REFUSED_REGISTRATION))
        return refuse(CUDA_ERROR_OUT_OF_MEMORY, "registration refused by seed");
    size = (size + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    void *place = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (place == MAP_FAILED) return refuse(CUDA_ERROR_OUT_OF_MEMORY, "no %zu bytes of host memory", size);
    host_region_add(
        (HostRegion){.address = (uintptr_t)place, .size = size, .flags = flags | DEVICE_MAP, .owned = true});
    *start = place;
    return CUDA_SUCCESS;
}

static CUresult release(void *start) {
    HostRegion *region = host_region_at((uintptr_t)start);
    if (region == NULL || region->address != (uintptr_t)start || !region->owned)
        return refuse(CUDA_ERROR_INVALID_VALUE, "cuMemFreeHost takes what cuMemHostAlloc gave, once");
    munmap(start, region->size);
    host_region_remove((uintptr_t)start);
    return CUDA_SUCCESS;
}

API CUresult cuMemHostRegister_v2(void *start, size_t size, unsigned flags) {
    CUresult result = call_begin(__func__, NEEDS_CONTEXT);
    if (result == CUDA_SUCCESS) result = enlist(start, size, flags);
    result = call_end(result, NULL, "\"address\":%zu,\"size\":%zu,\"flags\":%u", (size_t)start, size, flags);
    if (result == CUDA_SUCCESS) pay(size);
    return result;
}
API CUresult cuMemHostUnregister(void *start) {
    CALL(NEEDS_CONTEXT, strike_off(start), NULL, "\"address\":%zu", (size_t)start);
}
API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *address, void *start, unsigned flags) {
    CALL(NEEDS_CONTEXT, device_pointer(address, start, flags), NULL, "\"address\":%zu", (size_t)start);
}
API CUresult cuMemHostGetFlags(unsigned *flags, void *start) {
    CALL(NEEDS_CONTEXT, give_flags(flags, start), NULL, "\"address\":%zu", (size_t)start);
}
API CUresult cuMemHostAlloc(void **start, size_t size, unsigned flags) {
    CALL(NEEDS_CONTEXT, allocate(start, size, flags), NULL, "\"size\":%zu", size);
}
API CUresult cuMemFreeHost(void *start) { CALL(NEEDS_CONTEXT, release(start), NULL, "\"address\":%zu", (size_t)start); }
