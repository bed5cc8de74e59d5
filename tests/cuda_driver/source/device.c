// Devices, and what all processes share about them: a directory on shared memory.
//
// An allocation is a file there. Each open file description of it holds a shared flock, and the kernel drops that lock
// when the last descriptor, the last mapping and the last descriptor in flight over a socket are gone, however they went.
// So a file without a lock is memory that was freed: the count of live granules is the kernel's own.
#include "fake_cuda.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct {
    uint64_t order;
    uint64_t allocations;
    uint64_t used_granules[MAX_DEVICES]; // never too low; a sweep makes it exact
    uint32_t losses[MAX_DEVICES]; // odd while the device is lost; whoever brings it back adds one again
} Page;

static Page *page;
static int visible[MAX_DEVICES], visible_count;
static uint32_t losses_before[MAX_DEVICES]; // when this process began: a device that comes back is there for new processes

bool device_file_path(const char *name, char *path, size_t room) {
    return snprintf(path, room, "%s/%s", settings.directory, name) < (int)room;
}

static int lock_devices(void) {
    char path[600];
    device_file_path("lock", path, sizeof path);
    int descriptor = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (descriptor >= 0) flock(descriptor, LOCK_EX);
    return descriptor;
}

static void read_visible(void) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    visible_count = 0;
    for (int device = 0; text == NULL && device < settings.device_count; device++) visible[visible_count++] = device;
    while (text != NULL && *text != '\0' && visible_count < MAX_DEVICES) {
        char *end;
        long device = strtol(text, &end, 10);
        if (end == text || device < 0 || device >= settings.device_count) return; // as the driver: the rest is not seen
        visible[visible_count++] = (int)device;
        text = *end == ',' ? end + 1 : end;
    }
}

static uint32_t losses(int physical) { return __atomic_load_n(&page->losses[physical], __ATOMIC_SEQ_CST); }

CUresult device_open(void) {
    char path[600];
    if (mkdir(settings.directory, 0700) != 0 && errno != EEXIST) return CUDA_ERROR_OPERATING_SYSTEM;
    int lock = lock_devices();
    device_file_path("page", path, sizeof path);
    int descriptor = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (lock < 0 || descriptor < 0 || ftruncate(descriptor, PAGE_BYTES) != 0) return CUDA_ERROR_OPERATING_SYSTEM;
    page = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    close(lock);
    if (page == MAP_FAILED) return CUDA_ERROR_OPERATING_SYSTEM;
    read_visible();
    for (int each = 0; each < MAX_DEVICES; each++) losses_before[each] = losses(each);
    int seen = 0; // a device that fell off the bus is not there for a new process, and those behind it move up
    for (int each = 0; each < visible_count; each++)
        if (!(losses_before[visible[each]] & 1)) visible[seen++] = visible[each];
    visible_count = seen;
    return visible_count == 0 ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}

bool device_valid(CUdevice device) { return device >= 0 && device < visible_count; }
int device_physical(CUdevice device) { return visible[device]; }

CUdevice device_visible(int physical) {
    for (int each = 0; each < visible_count; each++)
        if (visible[each] == physical) return each;
    return -1;
}

uint64_t next_order(void) { return page == NULL ? 0 : __atomic_add_fetch(&page->order, 1, __ATOMIC_SEQ_CST); }
void device_lose(int physical) { __atomic_or_fetch(&page->losses[physical], 1, __ATOMIC_SEQ_CST); }
bool device_is_lost(int physical) { return losses(physical) != losses_before[physical]; }

// Removes what nobody holds any longer and counts the rest. The caller holds the lock of the devices.
static void sweep(void) {
    uint64_t used[MAX_DEVICES] = {0};
    DIR *directory = opendir(settings.directory);
    for (struct dirent *entry; directory != NULL && (entry = readdir(directory)) != NULL;) {
        int physical;
        struct stat status;
        if (sscanf(entry->d_name, "memory-%d-", &physical) != 1 || physical < 0 || physical >= MAX_DEVICES) continue;
        int descriptor = openat(dirfd(directory), entry->d_name, O_RDONLY | O_CLOEXEC);
        if (descriptor < 0 || fstat(descriptor, &status) != 0) continue;
        if (flock(descriptor, LOCK_EX | LOCK_NB) == 0) unlinkat(dirfd(directory), entry->d_name, 0);
        else used[physical] += (uint64_t)status.st_size / GRANULE_BYTES;
        close(descriptor);
    }
    if (directory != NULL) closedir(directory);
    for (int each = 0; each < MAX_DEVICES; each++) page->used_granules[each] = used[each];
}

uint64_t device_used_granules(int physical) {
    int lock = lock_devices();
    sweep();
    uint64_t used = page->used_granules[physical];
    close(lock);
    return used;
}

static int claims[MAX_DEVICES]; // descriptors of files whose lock the kernel drops with the process; 0 = none

bool device_claim(int physical) {
    if (settings.compute_mode == COMPUTE_DEFAULT || claims[physical] > 0) return true;
    char name[32], path[600];
    snprintf(name, sizeof name, "claim-%d", physical);
    device_file_path(name, path, sizeof path);
    int descriptor = settings.compute_mode == COMPUTE_PROHIBITED ? -1 : open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (descriptor < 0) return false;
    if (flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
        close(descriptor);
        return false;
    }
    claims[physical] = descriptor;
    return true;
}

void device_unclaim(int physical) {
    if (claims[physical] > 0) close(claims[physical]);
    claims[physical] = 0;
}

static int create_memory(int physical, size_t granules) {
    char name[64], path[600];
    snprintf(name, sizeof name, "memory-%d-%llu", physical, (unsigned long long)++page->allocations);
    device_file_path(name, path, sizeof path);
    int descriptor = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (descriptor < 0) return -1;
    if (flock(descriptor, LOCK_SH) == 0 && ftruncate(descriptor, (off_t)(granules * GRANULE_BYTES)) == 0)
        return descriptor;
    unlink(path);
    close(descriptor);
    return -1;
}

static void fill(int descriptor, size_t granules) {
    static unsigned char pattern[GRANULE_BYTES];
    if (pattern[0] == 0) memset(pattern, POISON_NEW, sizeof pattern);
    for (size_t each = 0; each < granules; each++)
        if (pwrite(descriptor, pattern, sizeof pattern, (off_t)(each * GRANULE_BYTES)) < 0) return;
}

int device_allocate(int physical, size_t granules) {
    int lock = lock_devices();
    if (page->used_granules[physical] + granules > settings.memory_granules) sweep();
    int descriptor = -1;
    if (page->used_granules[physical] + granules <= settings.memory_granules) {
        descriptor = create_memory(physical, granules);
        if (descriptor >= 0) page->used_granules[physical] += granules;
    }
    close(lock);
    if (descriptor >= 0 && settings.poison) fill(descriptor, granules);
    return descriptor;
}

int device_reopen(int descriptor, int flags) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
    int opened = open(path, flags | O_CLOEXEC);
    if (opened >= 0) flock(opened, LOCK_SH);
    return opened;
}

static bool read_name(int descriptor, int *physical, unsigned long long *count) {
    char path[64], target[700], prefix[600];
    snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(path, target, sizeof target - 1);
    if (length < 0) return false;
    target[length] = '\0';
    if (strstr(target, " (deleted)") != NULL) return false; // it was lost with its device
    device_file_path("memory-", prefix, sizeof prefix);
    return strncmp(target, prefix, strlen(prefix)) == 0 &&
           sscanf(target + strlen(prefix), "%d-%llu", physical, count) == 2;
}

int device_of_descriptor(int descriptor) {
    int physical;
    unsigned long long count;
    return read_name(descriptor, &physical, &count) ? physical : -1;
}

uint64_t device_memory_of(int descriptor) {
    int physical;
    unsigned long long count;
    return read_name(descriptor, &physical, &count) ? count : 0;
}
