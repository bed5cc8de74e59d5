// Where every call begins and ends; cuInit; and cuGetProcAddress, which finds calls by name and version.
#include "fake_cuda.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

Settings settings;
pthread_mutex_t driver_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t driver_changed;
static pid_t owner; // the process that called cuInit; 0 = nobody
static _Thread_local const char *current_call;
static _Thread_local char broken_rule[512];

uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void nap_us(uint64_t microseconds) {
    struct timespec rest = {(time_t)(microseconds / 1000000), (long)(microseconds % 1000000 * 1000)};
    while (nanosleep(&rest, &rest) != 0 && errno == EINTR) continue;
}

void wait_for_change(uint64_t until_ns) {
    struct timespec until = {(time_t)(until_ns / 1000000000u), (long)(until_ns % 1000000000u)};
    if (until_ns == 0) pthread_cond_wait(&driver_changed, &driver_lock);
    else pthread_cond_timedwait(&driver_changed, &driver_lock, &until);
}

static CUresult check_context(void) {
    Context *context = context_current();
    CUresult result = context_check();
    if (result != CUDA_SUCCESS) return result;
    if (fault_strikes(FAULT_DEVICE_LOST)) device_lose(device_physical(context->device));
    if (device_is_lost(device_physical(context->device)))
        return refuse(CUDA_ERROR_UNKNOWN, "device %d has fallen off the bus", context->device);
    return CUDA_SUCCESS;
}

// "This function may also return error codes from previous, asynchronous launches": the seed decides whether it does.
static CUresult check_late_error(void) {
    static uint64_t chances;
    Context *context = context_current();
    if (context == NULL || context->sticky == CUDA_SUCCESS || !(draw(DRAW_LATE_ERROR, ++chances, 0) & 1))
        return CUDA_SUCCESS;
    return refuse(context->sticky, "an earlier failure in the context may come back from any call");
}

CUresult call_begin(const char *name, Needs needs) {
    pthread_mutex_lock(&driver_lock);
    current_call = name;
    broken_rule[0] = '\0';
    if (needs == NEEDS_NOTHING) return CUDA_SUCCESS;
    if (owner == 0) return refuse(CUDA_ERROR_NOT_INITIALIZED, "cuInit comes before every other call");
    if (owner != getpid()) return refuse(CUDA_ERROR_NOT_INITIALIZED, "a process forked after cuInit cannot use CUDA");
    if (in_host_function()) return refuse(CUDA_ERROR_NOT_PERMITTED, "a host function on a stream makes no CUDA calls");
    CUresult result = needs == MAY_FAIL_LATE   ? check_late_error()
                      : needs == NEEDS_CONTEXT ? check_context()
                                               : CUDA_SUCCESS;
    return result == CUDA_SUCCESS ? capture_check(name) : result;
}

CUresult call_end(CUresult result, CUstream stream, const char *arguments, ...) {
    char words[1024];
    va_list rest;
    va_start(rest, arguments);
    vsnprintf(words, sizeof words, arguments, rest);
    va_end(rest);
    trace_call(current_call, stream, result, broken_rule, words);
    pthread_mutex_unlock(&driver_lock);
    return result;
}

CUresult refuse(CUresult result, const char *rule, ...) {
    va_list rest;
    va_start(rest, rule);
    vsnprintf(broken_rule, sizeof broken_rule, rule, rest);
    va_end(rest);
    fprintf(stderr, "fake cuda: process %d: %s: %s: %s\n", getpid(), current_call == NULL ? "a stream" : current_call,
            error_name(result), broken_rule);
    return result;
}

const char *rule_taken(void) {
    static _Thread_local char taken[sizeof broken_rule];
    memcpy(taken, broken_rule, sizeof taken);
    broken_rule[0] = '\0';
    return taken;
}

static uint64_t number(const char *name, uint64_t standard) {
    const char *text = getenv(name);
    return text == NULL || *text == '\0' ? standard : strtoull(text, NULL, 10);
}

static CUresult read_settings(void) {
    const char *directory = getenv("FAKE_CUDA_DIRECTORY"), *faults = getenv("FAKE_CUDA_FAULTS");
    int length = directory != NULL
                     ? snprintf(settings.directory, sizeof settings.directory, "%s", directory)
                     : snprintf(settings.directory, sizeof settings.directory, "/dev/shm/fake-cuda-%u", getuid());
    settings.seed = number("FAKE_CUDA_SEED", 0);
    settings.delay_us = number("FAKE_CUDA_DELAY_US", 500);
    settings.register_us_per_mib = number("FAKE_CUDA_REGISTER_US_PER_MIB", 33); // 34 ms per GB: what a server pays
    settings.memory_granules = number("FAKE_CUDA_MEMORY_MIB", 1024) * 1048576 / GRANULE_BYTES;
    settings.device_count = (int)number("FAKE_CUDA_DEVICES", 1);
    settings.version = (int)number("FAKE_CUDA_VERSION", 13000);
    settings.compute_mode = (int)number("FAKE_CUDA_COMPUTE_MODE", COMPUTE_DEFAULT);
    settings.poison = number("FAKE_CUDA_POISON", 1) != 0;
    settings.bad_memory = number("FAKE_CUDA_BAD_MEMORY", 0);
    settings.bad_offset = number("FAKE_CUDA_BAD_OFFSET", 0);
    if (length >= (int)sizeof settings.directory || settings.device_count > MAX_DEVICES)
        return refuse(CUDA_ERROR_OPERATING_SYSTEM, "FAKE_CUDA_DIRECTORY is too long, or FAKE_CUDA_DEVICES is above %d",
                      MAX_DEVICES);
    if (!faults_read(faults == NULL ? "" : faults))
        return refuse(CUDA_ERROR_OPERATING_SYSTEM,
                      "FAKE_CUDA_FAULTS is not a list of name=probability or name=@chance");
    return device_open();
}

static CUresult start(unsigned flags) {
    if (flags != 0) return refuse(CUDA_ERROR_INVALID_VALUE, "the flags of cuInit are 0");
    if (owner == getpid()) return CUDA_SUCCESS;
    if (owner != 0) return refuse(CUDA_ERROR_NOT_INITIALIZED, "a process forked after cuInit cannot use CUDA");
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&driver_changed, &attributes);
    CUresult result = read_settings();
    if (result != CUDA_SUCCESS) return result;
    trace_open(getenv("FAKE_CUDA_TRACE"));
    owner = getpid();
    return CUDA_SUCCESS;
}

API CUresult cuInit(unsigned flags) { CALL(NEEDS_NOTHING, start(flags), NULL, "\"flags\":%u", flags); }

API CUresult cuDriverGetVersion(int *version) {
    const char *text = getenv("FAKE_CUDA_VERSION"); // works before cuInit
    if (version == NULL) return CUDA_ERROR_INVALID_VALUE;
    *version = text == NULL ? 13000 : atoi(text);
    return CUDA_SUCCESS;
}

// --- cuGetProcAddress ---

// clang-format off: name, CUDA version that brought it, function
#define EACH_SYMBOL(DO) \
    DO(cuInit, 2000, cuInit) DO(cuDriverGetVersion, 2020, cuDriverGetVersion) \
    DO(cuGetErrorName, 6000, cuGetErrorName) DO(cuGetErrorString, 6000, cuGetErrorString) \
    DO(cuGetProcAddress, 11030, cuGetProcAddress) DO(cuGetProcAddress, 12000, cuGetProcAddress_v2) \
    DO(cuDeviceGet, 2000, cuDeviceGet) DO(cuDeviceGetCount, 2000, cuDeviceGetCount) \
    DO(cuDeviceGetName, 2000, cuDeviceGetName) DO(cuDeviceGetUuid, 9020, cuDeviceGetUuid) \
    DO(cuDeviceGetUuid, 11040, cuDeviceGetUuid_v2) DO(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2) \
    DO(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute) \
    DO(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain) \
    DO(cuDevicePrimaryCtxRelease, 11000, cuDevicePrimaryCtxRelease_v2) \
    DO(cuDevicePrimaryCtxReset, 11000, cuDevicePrimaryCtxReset_v2) \
    DO(cuDevicePrimaryCtxGetState, 7000, cuDevicePrimaryCtxGetState) \
    DO(cuDevicePrimaryCtxSetFlags, 11000, cuDevicePrimaryCtxSetFlags_v2) DO(cuCtxSetCurrent, 4000, cuCtxSetCurrent) \
    DO(cuCtxGetCurrent, 4000, cuCtxGetCurrent) DO(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2) \
    DO(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2) DO(cuCtxGetDevice, 2000, cuCtxGetDevice) \
    DO(cuCtxSynchronize, 2000, cuCtxSynchronize) DO(cuMemGetInfo, 3020, cuMemGetInfo_v2) \
    DO(cuMemAlloc, 3020, cuMemAlloc_v2) DO(cuMemFree, 3020, cuMemFree_v2) \
    DO(cuMemGetAddressRange, 3020, cuMemGetAddressRange_v2) DO(cuPointerGetAttribute, 4000, cuPointerGetAttribute) \
    DO(cuIpcGetMemHandle, 4010, cuIpcGetMemHandle) \
    DO(cuIpcOpenMemHandle, 11000, cuIpcOpenMemHandle_v2) DO(cuIpcCloseMemHandle, 4010, cuIpcCloseMemHandle) \
    DO(cuMemGetAllocationGranularity, 10020, cuMemGetAllocationGranularity) DO(cuMemCreate, 10020, cuMemCreate) \
    DO(cuMemRelease, 10020, cuMemRelease) DO(cuMemRetainAllocationHandle, 11000, cuMemRetainAllocationHandle) \
    DO(cuMemExportToShareableHandle, 10020, cuMemExportToShareableHandle) \
    DO(cuMemImportFromShareableHandle, 10020, cuMemImportFromShareableHandle) \
    DO(cuMemAddressReserve, 10020, cuMemAddressReserve) DO(cuMemAddressFree, 10020, cuMemAddressFree) \
    DO(cuMemMap, 10020, cuMemMap) DO(cuMemUnmap, 10020, cuMemUnmap) DO(cuMemSetAccess, 10020, cuMemSetAccess) \
    DO(cuMemGetAccess, 10020, cuMemGetAccess) DO(cuMemHostRegister, 6050, cuMemHostRegister_v2) \
    DO(cuMemHostUnregister, 4000, cuMemHostUnregister) \
    DO(cuMemHostGetDevicePointer, 3020, cuMemHostGetDevicePointer_v2) DO(cuMemHostGetFlags, 2030, cuMemHostGetFlags) \
    DO(cuMemHostAlloc, 2020, cuMemHostAlloc) DO(cuMemFreeHost, 2000, cuMemFreeHost) \
    DO(cuStreamCreate, 2000, cuStreamCreate) DO(cuStreamCreateWithPriority, 5050, cuStreamCreateWithPriority) \
    DO(cuStreamDestroy, 4000, cuStreamDestroy_v2) DO(cuStreamSynchronize, 2000, cuStreamSynchronize) \
    DO(cuStreamQuery, 2000, cuStreamQuery) DO(cuStreamWaitEvent, 3020, cuStreamWaitEvent) \
    DO(cuStreamWriteValue32, 11070, cuStreamWriteValue32_v2) \
    DO(cuStreamWriteValue64, 11070, cuStreamWriteValue64_v2) DO(cuStreamWaitValue32, 11070, cuStreamWaitValue32_v2) \
    DO(cuStreamWaitValue64, 11070, cuStreamWaitValue64_v2) DO(cuLaunchHostFunc, 10000, cuLaunchHostFunc) \
    DO(cuEventCreate, 2000, cuEventCreate) DO(cuEventDestroy, 4000, cuEventDestroy_v2) \
    DO(cuEventRecord, 2000, cuEventRecord) DO(cuEventQuery, 2000, cuEventQuery) \
    DO(cuEventSynchronize, 2000, cuEventSynchronize) DO(cuEventElapsedTime, 2000, cuEventElapsedTime) \
    DO(cuIpcGetEventHandle, 4010, cuIpcGetEventHandle) DO(cuIpcOpenEventHandle, 4010, cuIpcOpenEventHandle) \
    DO(cuMemcpy, 4000, cuMemcpy) DO(cuMemcpyAsync, 4000, cuMemcpyAsync) DO(cuMemcpyHtoD, 3020, cuMemcpyHtoD_v2) \
    DO(cuMemcpyDtoH, 3020, cuMemcpyDtoH_v2) DO(cuMemcpyDtoD, 3020, cuMemcpyDtoD_v2) \
    DO(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2) DO(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2) \
    DO(cuMemcpyDtoDAsync, 3020, cuMemcpyDtoDAsync_v2) DO(cuMemcpy3DAsync, 3020, cuMemcpy3DAsync_v2) \
    DO(cuMemcpyBatchAsync, 12080, cuMemcpyBatchAsync) DO(cuMemcpyBatchAsync, 13000, cuMemcpyBatchAsync_v2) \
    DO(cuMemsetD8, 3020, cuMemsetD8_v2) \
    DO(cuMemsetD8Async, 3020, cuMemsetD8Async) DO(cuStreamBeginCapture, 10010, cuStreamBeginCapture_v2) \
    DO(cuStreamEndCapture, 10000, cuStreamEndCapture) DO(cuStreamIsCapturing, 10000, cuStreamIsCapturing) \
    DO(cuThreadExchangeStreamCaptureMode, 10010, cuThreadExchangeStreamCaptureMode) \
    DO(cuGraphInstantiate, 12000, cuGraphInstantiateWithFlags) \
    DO(cuGraphInstantiateWithFlags, 11040, cuGraphInstantiateWithFlags) DO(cuGraphLaunch, 10000, cuGraphLaunch) \
    DO(cuGraphDestroy, 10000, cuGraphDestroy) DO(cuGraphExecDestroy, 10000, cuGraphExecDestroy)
// clang-format on

typedef struct {
    const char *name;
    int version;
    void *function;
} Symbol;

#define DECLARE(name, since, function) extern char function##_entry[] __asm__(#function);
EACH_SYMBOL(DECLARE)
#define ROW(name, since, function) {#name, since, function##_entry},
static const Symbol SYMBOLS[] = {EACH_SYMBOL(ROW)};

enum { FOUND = 0, UNKNOWN_NAME = 1, VERSION_TOO_LOW = 2, PER_THREAD_DEFAULT_STREAM = 2 };

static CUresult find_symbol(const char *name, void **function, int version, unsigned long long flags, int *status) {
    int ceiling = 0;
    int unused;
    cuDriverGetVersion(&ceiling);
    if (name == NULL || function == NULL)
        return refuse(CUDA_ERROR_INVALID_VALUE, "cuGetProcAddress needs a name and a place");
    if (status == NULL) status = &unused;
    *function = NULL;
    *status = UNKNOWN_NAME;
    if (flags & PER_THREAD_DEFAULT_STREAM)
        return refuse(CUDA_ERROR_NOT_FOUND, "this driver has no per-thread default stream");
    for (size_t each = 0; each < sizeof SYMBOLS / sizeof *SYMBOLS; each++) { // versions of a name go up
        if (strcmp(SYMBOLS[each].name, name) != 0 || SYMBOLS[each].version > ceiling) continue;
        if (SYMBOLS[each].version <= version) *function = SYMBOLS[each].function;
        else if (*function == NULL) *status = VERSION_TOO_LOW;
    }
    if (*function != NULL) *status = FOUND;
    return *function == NULL ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

API CUresult cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags,
                                 int *status) {
    CALL(NEEDS_NOTHING, find_symbol(name, function, version, flags, status), NULL, "\"version\":%d", version);
}

API CUresult cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags) {
    CALL(NEEDS_NOTHING, find_symbol(name, function, version, flags, NULL), NULL, "\"version\":%d", version);
}
