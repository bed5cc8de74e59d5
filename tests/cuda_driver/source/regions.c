// Address ranges of this process: device memory, host memory that is registered, and reserved addresses.
// Sorted arrays: a batch of thousands of copies looks up each of its ends.
#include "fake_cuda.h"

#include <stdlib.h>
#include <string.h>

// One shape for the three tables. Elements begin with {address, size}; none overlaps another.
typedef struct {
    unsigned char *elements;
    size_t element_size, count, room;
} Table;

static Table regions = {.element_size = sizeof(Region)};
static Table host_regions = {.element_size = sizeof(HostRegion)};
static Table reservations = {.element_size = sizeof(Reservation)};
static uint64_t serials_given;

static Reservation *element(const Table *table, size_t index) { // every element begins as a Reservation does
    return (Reservation *)(void *)(table->elements + index * table->element_size);
}

// Index of the first element that ends behind the address.
static size_t first_behind(const Table *table, uintptr_t address) {
    size_t low = 0, high = table->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (element(table, middle)->address + element(table, middle)->size <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void *table_after(const Table *table, uintptr_t address) {
    size_t index = first_behind(table, address);
    return index < table->count ? element(table, index) : NULL;
}

static void *table_at(const Table *table, uintptr_t address) {
    Reservation *found = table_after(table, address);
    return found != NULL && found->address <= address ? found : NULL;
}

static bool table_touches(const Table *table, uintptr_t address, size_t size) {
    Reservation *found = table_after(table, address);
    return found != NULL && found->address < address + size;
}

static void *table_add(Table *table, const void *value) {
    size_t index = first_behind(table, ((const Reservation *)value)->address);
    if (table->count == table->room) {
        table->room = table->room == 0 ? 64 : table->room * 2;
        table->elements = realloc(table->elements, table->room * table->element_size);
        if (table->elements == NULL) abort();
    }
    memmove(table->elements + (index + 1) * table->element_size, table->elements + index * table->element_size,
            (table->count - index) * table->element_size);
    memcpy(table->elements + index * table->element_size, value, table->element_size);
    table->count++;
    return element(table, index);
}

static void table_remove(Table *table, uintptr_t address) {
    size_t index = first_behind(table, address);
    memmove(table->elements + index * table->element_size, table->elements + (index + 1) * table->element_size,
            (table->count - index - 1) * table->element_size);
    table->count--;
}

Region *region_add(Region region) {
    region.serial = ++serials_given;
    return table_add(&regions, &region);
}
Region *region_at(uintptr_t address) { return table_at(&regions, address); }
Region *region_after(uintptr_t address) { return table_after(&regions, address); }
void region_remove(uintptr_t address) { table_remove(&regions, address); }

// A visit may remove the region that it is given.
void regions_each(void (*visit)(Region *region, void *context), void *context) {
    for (size_t index = regions.count; index-- > 0;) visit((Region *)(void *)element(&regions, index), context);
}

HostRegion *host_region_add(HostRegion region) {
    uintptr_t first = region.address / PAGE_BYTES * PAGE_BYTES; // what is pinned is pages
    uintptr_t end = (region.address + region.size + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    HostRegion *near = table_after(&host_regions, first > PAGE_BYTES ? first - PAGE_BYTES : 0);
    for (; near != NULL && near->address < end; near = table_after(&host_regions, near->address + near->size))
        if ((near->address + near->size + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES > first) return NULL;
    region.serial = ++serials_given;
    return table_add(&host_regions, &region);
}
HostRegion *host_region_at(uintptr_t address) { return table_at(&host_regions, address); }
void host_regions_clear(void) { host_regions.count = 0; }
void host_region_remove(uintptr_t address) { table_remove(&host_regions, address); }

void reservation_add(Reservation reservation) { table_add(&reservations, &reservation); }
bool reservation_touches(uintptr_t address, size_t size) { return table_touches(&reservations, address, size); }
void reservation_remove(uintptr_t address) { table_remove(&reservations, address); }
Reservation *reservation_of(uintptr_t address, size_t size) {
    Reservation *found = table_at(&reservations, address);
    return found != NULL && size <= found->size && address - found->address <= found->size - size ? found : NULL;
}

static CUresult check_device(uintptr_t address, size_t size, bool is_written, const char *which, uint64_t *serials) {
    uintptr_t at = address;
    while (at < address + size) {
        Region *region = region_at(at);
        if (region == NULL)
            return refuse(CUDA_ERROR_INVALID_VALUE, "the %s of a copy has no memory mapped at %#zx", which, (size_t)at);
        if (region->access == ACCESS_NONE)
            return refuse(CUDA_ERROR_INVALID_VALUE, "the %s of a copy has no access before cuMemSetAccess at %#zx",
                          which, (size_t)at);
        if (is_written && region->access == ACCESS_READ)
            return refuse(CUDA_ERROR_INVALID_VALUE, "the %s of a copy is mapped for reading only at %#zx", which,
                          (size_t)at);
        if (region->kind != REGION_MAPPED && (at != address || address + size > region->address + region->size))
            return refuse(CUDA_ERROR_INVALID_VALUE, "the %s of a copy goes beyond the end of its allocation", which);
        *serials += region->serial;
        at = region->address + region->size;
    }
    return CUDA_SUCCESS;
}

CUresult range_check(uintptr_t address, size_t size, bool is_written, const char *which, Side *side,
                     uint64_t *serials) {
    *serials = 0;
    if (size == 0 || address + size < address)
        return refuse(CUDA_ERROR_INVALID_VALUE, "the %s of a copy is empty or wraps", which);
    if (region_at(address) != NULL || table_at(&reservations, address) != NULL) {
        *side = SIDE_DEVICE;
        return check_device(address, size, is_written, which, serials);
    }
    if (table_touches(&regions, address, size) || table_touches(&reservations, address, size))
        return refuse(CUDA_ERROR_INVALID_VALUE, "the %s of a copy begins in host memory and goes on in device memory",
                      which);
    HostRegion *host = host_region_at(address);
    if (host == NULL && table_touches(&host_regions, address, size))
        return refuse(CUDA_ERROR_INVALID_VALUE,
                      "the %s of a copy begins in pageable memory and goes on in registered memory", which);
    if (host != NULL && address + size > host->address + host->size)
        return refuse(CUDA_ERROR_INVALID_VALUE, "the %s of a copy straddles the end of a registered range", which);
    *side = host == NULL ? SIDE_PAGEABLE : SIDE_PINNED;
    *serials = host == NULL ? 0 : host->serial;
    return CUDA_SUCCESS;
}

uint64_t range_serials(uintptr_t address, size_t size) {
    uint64_t serials = 0;
    HostRegion *host = host_region_at(address);
    if (host != NULL) return host->serial;
    for (Region *region = region_at(address); region != NULL && region->address < address + size;
         region = region_at(region->address + region->size))
        serials += region->access == ACCESS_NONE ? 0 : region->serial;
    return serials;
}

bool range_is_bad(uintptr_t address, size_t size) {
    for (Region *region = region_at(address); region != NULL && region->address < address + size;
         region = region_at(region->address + region->size))
        if (region->bad >= address && region->bad < address + size) return true;
    return false;
}
