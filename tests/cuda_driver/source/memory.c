// Virtual memory management: handles of memory, reserved addresses, mappings, access, and descriptors to share.
#include "fake_cuda.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LOCATION_DEVICE = 1, TYPE_PINNED = 1, HANDLE_POSIX_DESCRIPTOR = 1 };

typedef struct {
    int type;
    int id;
} Location;

typedef struct {
    int type;
    int requested_handle_types;
    Location location;
    void *unused;
    struct {
        unsigned char compression, gpu_direct;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
} AllocationProperties;

typedef struct {
    Location location;
    int flags;
} AccessDescription;

typedef struct Handle Handle;
struct Handle {
    Handle *next;
    uint64_t name; // never used twice
    int descriptor;
    size_t size;
    int physical;
    int handle_types;
    unsigned references;
};

static Handle *handles;
static uint64_t names_given = 0x7000;

static Handle *find(uint64_t name) {
    for (Handle *each = handles; each != NULL; each = each->next)
        if (each->name == name) return each;
    return NULL;
}

static CUresult check_properties(const AllocationProperties *properties) {
    if (properties == NULL || properties->type != TYPE_PINNED)
        return refuse(CUDA_ERROR_INVALID_VALUE, "memory is of the type CU_MEM_ALLOCATION_TYPE_PINNED");
    if (properties->location.type != LOCATION_DEVICE)
        return refuse(CUDA_ERROR_NOT_SUPPORTED, "this driver makes memory on devices only");
    if (!device_valid(properties->location.id))
        return refuse(CUDA_ERROR_INVALID_DEVICE, "this process sees no device %d", properties->location.id);
    if (properties->requested_handle_types & ~HANDLE_POSIX_DESCRIPTOR)
        return refuse(CUDA_ERROR_NOT_SUPPORTED, "the only handles to share here are POSIX file descriptors");
    return CUDA_SUCCESS;
}

static CUresult add_handle(CUmemGenericAllocationHandle *name, int descriptor, size_t size, int physical,
                           int handle_types) {
    Handle *handle = calloc(1, sizeof *handle);
    if (handle == NULL) abort();
    *handle = (Handle){handles, names_given += 0x10, descriptor, size, physical, handle_types, 1};
    handles = handle;
    *name = handle->name;
    return CUDA_SUCCESS;
}

static CUresult create(CUmemGenericAllocationHandle *name, size_t size, const AllocationProperties *properties,
                       unsigned long long flags) {
    CUresult result = check_properties(properties);
    if (result != CUDA_SUCCESS) return result;
    if (name == NULL || flags != 0)
        return refuse(CUDA_ERROR_INVALID_VALUE, "the flags of cuMemCreate are 0, and the handle needs a place");
    if (size == 0 || size % GRANULE_BYTES != 0)
        return refuse(CUDA_ERROR_INVALID_VALUE, "%zu bytes are no multiple of the granularity of 2 MiB", size);
    if (fault_strikes(FAULT_OUT_OF_MEMORY)) return refuse(CUDA_ERROR_OUT_OF_MEMORY, "out of memory by seed");
    int physical = device_physical(properties->location.id);
    int descriptor = device_allocate(physical, size / GRANULE_BYTES);
    if (descriptor < 0) return refuse(CUDA_ERROR_OUT_OF_MEMORY, "the device has no %zu bytes left", size);
    return add_handle(name, descriptor, size, physical, properties->requested_handle_types);
}

static void drop_reference(Handle *handle) {
    if (--handle->references > 0) return;
    Handle **link = &handles;
    while (*link != handle) link = &(*link)->next;
    *link = handle->next;
    close(handle->descriptor); // mappings hold the memory from here on, as do descriptors that were exported
    free(handle);
}

static CUresult release(uint64_t name) {
    Handle *handle = find(name);
    if (handle == NULL)
        return refuse(CUDA_ERROR_INVALID_VALUE,
                      "the handle was released as often as it was obtained, or never was one");
    drop_reference(handle);
    return CUDA_SUCCESS;
}

static CUresult retain(CUmemGenericAllocationHandle *name, void *address) {
    Region *region = region_at((uintptr_t)address);
    if (name == NULL || region == NULL || region->kind != REGION_MAPPED)
        return refuse(CUDA_ERROR_INVALID_VALUE, "no handle is mapped at the address");
    Handle *handle = find(region->handle);
    if (handle == NULL)
        return refuse(CUDA_ERROR_NOT_SUPPORTED,
                      "this driver gives no handle again that was released while it was mapped");
    handle->references++;
    *name = handle->name;
    return CUDA_SUCCESS;
}

static CUresult export(void *shareable, uint64_t name, int type, unsigned long long flags) {
    Handle *handle = find(name);
    if (handle == NULL || shareable == NULL || flags != 0)
        return refuse(CUDA_ERROR_INVALID_VALUE, "an export needs a handle that is held, a place and the flags 0");
    if (type != HANDLE_POSIX_DESCRIPTOR)
        return refuse(CUDA_ERROR_NOT_SUPPORTED, "the only handles to share here are POSIX file descriptors");
    if (!(handle->handle_types & type))
        return refuse(CUDA_ERROR_INVALID_VALUE,
                      "the memory was created without requestedHandleTypes POSIX_FILE_DESCRIPTOR");
    if (fault_strikes(FAULT_REFUSED_EXPORT)) return refuse(CUDA_ERROR_NOT_PERMITTED, "export refused by seed");
    // For writing only: nobody can map it who does not use the driver, which is so with a real one.
    int descriptor = device_reopen(handle->descriptor, O_WRONLY);
    if (descriptor < 0) return refuse(CUDA_ERROR_OPERATING_SYSTEM, "no more descriptors in this process");
    *(int *)shareable = descriptor;
    return CUDA_SUCCESS;
}

static CUresult import(CUmemGenericAllocationHandle *name, int shared, int type) {
    struct stat status;
    if (name == NULL || type != HANDLE_POSIX_DESCRIPTOR)
        return refuse(CUDA_ERROR_INVALID_VALUE, "an import needs a POSIX file descriptor and a place for the handle");
    int physical = device_of_descriptor(shared);
    if (physical < 0) return refuse(CUDA_ERROR_INVALID_VALUE, "descriptor %d is no memory of these devices", shared);
    if (device_visible(physical) < 0)
        return refuse(CUDA_ERROR_NOT_SUPPORTED, "this process does not see the device of the memory");
    int descriptor = device_reopen(shared, O_RDWR);
    if (descriptor < 0 || fstat(descriptor, &status) != 0)
        return refuse(CUDA_ERROR_OPERATING_SYSTEM, "no more descriptors in this process");
    return add_handle(name, descriptor, (size_t)status.st_size, physical, HANDLE_POSIX_DESCRIPTOR);
}

enum { RESERVED = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE };

static void *reserve_anywhere(size_t size, size_t alignment) {
    unsigned char *wide = mmap(NULL, size + alignment, PROT_NONE, RESERVED, -1, 0);
    if (wide == MAP_FAILED) return MAP_FAILED;
    size_t before = (alignment - (uintptr_t)wide % alignment) % alignment;
    if (before > 0) munmap(wide, before);
    munmap(wide + before + size, alignment - before);
    return wide + before;
}

static void *reserve_near(uintptr_t hint, size_t size, size_t alignment) {
    if (hint == 0 || hint % alignment != 0) return reserve_anywhere(size, alignment);
    void *place = mmap((void *)hint, size, PROT_NONE, RESERVED | MAP_FIXED_NOREPLACE, -1, 0);
    if (place == MAP_FAILED) return reserve_anywhere(size, alignment);
    if (!fault_strikes(FAULT_IGNORED_HINT)) return place;
    void *elsewhere = reserve_anywhere(size, alignment); // while the place that was asked for is taken
    munmap(place, size);
    return elsewhere;
}

static CUresult reserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint,
                        unsigned long long flags) {
    if (address == NULL || flags != 0 || size == 0 || size % PAGE_BYTES != 0 || hint % PAGE_BYTES != 0)
        return refuse(CUDA_ERROR_INVALID_VALUE, "size and address are multiples of the page size and flags are 0");
    if (alignment & (alignment - 1)) return refuse(CUDA_ERROR_INVALID_VALUE, "the alignment is 0 or a power of two");
    void *place = reserve_near(hint, size, alignment < GRANULE_BYTES ? GRANULE_BYTES : alignment);
    if (place == MAP_FAILED) return refuse(CUDA_ERROR_OUT_OF_MEMORY, "no %zu bytes of addresses are free", size);
    reservation_add((Reservation){(uintptr_t)place, size});
    *address = (CUdeviceptr)(uintptr_t)place;
    return CUDA_SUCCESS;
}

static CUresult free_address(CUdeviceptr address, size_t size) {
    Reservation *reservation = reservation_of(address, size);
    Region *inside = region_after(address);
    if (reservation == NULL || reservation->address != address || reservation->size != size)
        return refuse(CUDA_ERROR_INVALID_VALUE, "a range is freed as it was reserved, whole");
    if (inside != NULL && inside->address < address + size)
        return refuse(CUDA_ERROR_INVALID_VALUE, "the range still has memory mapped at %#zx", (size_t)inside->address);
    munmap((void *)address, size);
    reservation_remove(address);
    return CUDA_SUCCESS;
}

static CUresult map(CUdeviceptr address, size_t size, size_t offset, uint64_t name, unsigned long long flags) {
    Handle *handle = find(name);
    Region *next = region_after(address);
    if (handle == NULL || flags != 0)
        return refuse(CUDA_ERROR_INVALID_VALUE, "a mapping needs a handle that is held, and the flags 0");
    if (offset != 0) return refuse(CUDA_ERROR_INVALID_VALUE, "the offset of a mapping is 0");
    if (size != handle->size)
        return refuse(CUDA_ERROR_INVALID_VALUE, "a handle is mapped whole: %zu of %zu bytes", size, handle->size);
    if (address % GRANULE_BYTES != 0)
        return refuse(CUDA_ERROR_INVALID_VALUE, "the address is no multiple of the granularity of 2 MiB");
    if (reservation_of(address, size) == NULL)
        return refuse(CUDA_ERROR_INVALID_VALUE, "the range was not reserved with cuMemAddressReserve");
    if (next != NULL && next->address < address + size)
        return refuse(CUDA_ERROR_INVALID_VALUE, "the range has memory mapped already");
    void *place = mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle->descriptor, 0);
    if (place == MAP_FAILED) return refuse(CUDA_ERROR_OUT_OF_MEMORY, "the process has no room for one more mapping");
    bool is_bad = settings.bad_memory != 0 && device_memory_of(handle->descriptor) == settings.bad_memory;
    region_add((Region){.address = address,
                        .size = size,
                        .kind = REGION_MAPPED,
                        .physical = handle->physical,
                        .handle = name,
                        .descriptor = -1,
                        .bad = is_bad ? address + settings.bad_offset : 0});
    return CUDA_SUCCESS;
}

// Sets the access of the mappings that make up the range exactly; a negative protection only checks that they do.
static CUresult each_mapping(CUdeviceptr address, size_t size, int protection, unsigned access) {
    uintptr_t end = address + size;
    for (uintptr_t at = address; at < end;) {
        Region *region = region_at(at);
        if (region == NULL || region->kind != REGION_MAPPED || region->address < address ||
            region->address + region->size > end)
            return refuse(CUDA_ERROR_INVALID_VALUE, "the range is not made of whole mappings at %#zx", (size_t)at);
        at = region->address + region->size;
    }
    for (uintptr_t at = address; protection >= 0 && at < end;) {
        Region *region = region_at(at);
        if (mprotect((void *)at, region->size, protection) != 0)
            return refuse(CUDA_ERROR_OUT_OF_MEMORY, "the process has no room for one more mapping");
        region->access = access;
        at += region->size;
    }
    return CUDA_SUCCESS;
}

// Does not wait for work that is queued: such work then fails, for this driver finds it where a real one may go wrong.
static CUresult unmap(CUdeviceptr address, size_t size) {
    if (size == 0) return refuse(CUDA_ERROR_INVALID_VALUE, "the range is empty");
    CUresult result = each_mapping(address, size, -1, 0);
    if (result != CUDA_SUCCESS) return result;
    void *place =
        mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) return refuse(CUDA_ERROR_OUT_OF_MEMORY, "the process has no room for one more mapping");
    for (uintptr_t at = address; at < address + size;) {
        size_t step = region_at(at)->size;
        region_remove(at);
        at += step;
    }
    return CUDA_SUCCESS;
}

static CUresult set_access(CUdeviceptr address, size_t size, const AccessDescription *descriptions, size_t count) {
    static const int PROTECTION[] = {PROT_NONE, PROT_READ, -1, PROT_READ | PROT_WRITE};
    CUresult result = CUDA_SUCCESS;
    if (descriptions == NULL || count == 0 || size == 0)
        return refuse(CUDA_ERROR_INVALID_VALUE, "access is set for a range and a device");
    for (size_t each = 0; each < count && result == CUDA_SUCCESS; each++) {
        const AccessDescription *one = &descriptions[each];
        Region *region = region_at(address);
        if (one->location.type != LOCATION_DEVICE || !device_valid(one->location.id))
            return refuse(CUDA_ERROR_INVALID_DEVICE, "access is set for a device that this process sees");
        if (one->flags < 0 || one->flags > 3 || one->flags == 2)
            return refuse(CUDA_ERROR_INVALID_VALUE, "access is none, read, or read and write");
        if (region != NULL && region->physical != device_physical(one->location.id))
            return refuse(CUDA_ERROR_NOT_SUPPORTED, "this driver has no access from one device to another's memory");
        result = each_mapping(address, size, PROTECTION[one->flags], (unsigned)one->flags);
    }
    return result;
}

static CUresult get_access(unsigned long long *flags, const Location *location, CUdeviceptr address) {
    Region *region = region_at(address);
    if (flags == NULL || location == NULL || region == NULL)
        return refuse(CUDA_ERROR_INVALID_VALUE, "no memory is mapped at the address");
    *flags = location->type == LOCATION_DEVICE && device_visible(region->physical) == location->id ? region->access
                                                                                                   : ACCESS_NONE;
    return CUDA_SUCCESS;
}

static CUresult granularity(size_t *bytes, const AllocationProperties *properties, int option) {
    CUresult result = check_properties(properties);
    if (result != CUDA_SUCCESS) return result;
    if (bytes == NULL || option < 0 || option > 1)
        return refuse(CUDA_ERROR_INVALID_VALUE, "the granularity is the minimum or the recommended one");
    *bytes = GRANULE_BYTES;
    return CUDA_SUCCESS;
}

API CUresult cuMemGetAllocationGranularity(size_t *bytes, const AllocationProperties *properties, int option) {
    CALL(NEEDS_INIT, granularity(bytes, properties, option), NULL, "\"option\":%d", option);
}
API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const AllocationProperties *properties,
                         unsigned long long flags) {
    CALL(NEEDS_INIT, create(handle, size, properties, flags), NULL, "\"size\":%zu,\"handle\":%llu", size,
         result_ == CUDA_SUCCESS ? *handle : 0);
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    CALL(MAY_FAIL_LATE, release(handle), NULL, "\"handle\":%llu", handle);
}
API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    CALL(NEEDS_INIT, retain(handle, address), NULL, "\"address\":%zu", (size_t)address);
}
API CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, int type,
                                          unsigned long long flags) {
    CALL(NEEDS_INIT, export(shareable, handle, type, flags), NULL, "\"handle\":%llu", handle);
}
API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shared, int type) {
    CALL(NEEDS_INIT, import(handle, (int)(intptr_t)shared, type), NULL, "\"handle\":%llu",
         result_ == CUDA_SUCCESS ? *handle : 0);
}
API CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint,
                                 unsigned long long flags) {
    CALL(NEEDS_INIT, reserve(address, size, alignment, hint, flags), NULL,
         "\"address\":%llu,\"size\":%zu,\"hint\":%llu", result_ == CUDA_SUCCESS ? *address : 0, size, hint);
}
API CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    CALL(NEEDS_INIT, free_address(address, size), NULL, "\"address\":%llu,\"size\":%zu", address, size);
}
API CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags) {
    CALL(MAY_FAIL_LATE, map(address, size, offset, handle, flags), NULL,
         "\"address\":%llu,\"size\":%zu,\"offset\":%zu,\"handle\":%llu", address, size, offset, handle);
}
API CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    CALL(MAY_FAIL_LATE, unmap(address, size), NULL, "\"address\":%llu,\"size\":%zu", address, size);
}
API CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const AccessDescription *descriptions, size_t count) {
    CALL(MAY_FAIL_LATE, set_access(address, size, descriptions, count), NULL, "\"address\":%llu,\"size\":%zu", address,
         size);
}
API CUresult cuMemGetAccess(unsigned long long *flags, const Location *location, CUdeviceptr address) {
    CALL(NEEDS_INIT, get_access(flags, location, address), NULL, "\"address\":%llu", address);
}
