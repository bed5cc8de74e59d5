// Many threads use every part of the driver at once; test_threads.py runs this under the thread sanitizer.
#include "source/fake_cuda.h"

#include <stdio.h>
#include <stdlib.h>

CUresult cuInit(unsigned);
CUresult cuDevicePrimaryCtxRetain(CUcontext *, CUdevice);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuCtxSynchronize(void);
CUresult cuMemAlloc_v2(CUdeviceptr *, size_t);
CUresult cuMemFree_v2(CUdeviceptr);
CUresult cuMemHostAlloc(void **, size_t, unsigned);
CUresult cuMemFreeHost(void *);
CUresult cuStreamCreate(CUstream *, unsigned);
CUresult cuStreamDestroy_v2(CUstream);
CUresult cuStreamSynchronize(CUstream);
CUresult cuStreamQuery(CUstream);
CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned);
CUresult cuStreamWriteValue64_v2(CUstream, CUdeviceptr, uint64_t, unsigned);
CUresult cuStreamWaitValue64_v2(CUstream, CUdeviceptr, uint64_t, unsigned);
CUresult cuLaunchHostFunc(CUstream, void (*)(void *), void *);
CUresult cuEventCreate(CUevent *, unsigned);
CUresult cuEventDestroy_v2(CUevent);
CUresult cuEventRecord(CUevent, CUstream);
CUresult cuEventSynchronize(CUevent);
CUresult cuMemcpyAsync(CUdeviceptr, CUdeviceptr, size_t, CUstream);

enum { THREADS = 4, ROUNDS = 25, BYTES = 65536 };
static CUcontext context;

static void check(CUresult result, int line) {
    if (result == CUDA_SUCCESS) return;
    fprintf(stderr, "line %d: result %d\n", line, (int)result);
    exit(1);
}
#define CHECK(call) check(call, __LINE__)

static void count(void *counter) { ++*(int *)counter; }

static void round_trip(CUstream from, CUstream to, unsigned char *host, CUdeviceptr device, int round) {
    CUevent event;
    int counted = 0;
    CHECK(cuEventCreate(&event, 2));
    CHECK(cuLaunchHostFunc(from, count, &counted));
    CHECK(cuMemcpyAsync(device, (CUdeviceptr)(uintptr_t)host, BYTES / 2, from));
    CHECK(cuEventRecord(event, from));
    CHECK(cuStreamWaitEvent(to, event, 0));
    CHECK(cuMemcpyAsync((CUdeviceptr)(uintptr_t)(host + BYTES / 2), device, BYTES / 2 - 8, to));
    CHECK(cuStreamWriteValue64_v2(to, (CUdeviceptr)(uintptr_t)(host + BYTES - 8), (uint64_t)round, 0));
    CHECK(cuStreamWaitValue64_v2(from, (CUdeviceptr)(uintptr_t)(host + BYTES - 8), (uint64_t)round, 0));
    CHECK(cuEventSynchronize(event));
    cuStreamQuery(to);
    CHECK(cuStreamSynchronize(to));
    CHECK(cuStreamSynchronize(from));
    CHECK(cuEventDestroy_v2(event));
    if (counted != 1 || host[BYTES / 2] != host[0]) check(CUDA_ERROR_UNKNOWN, __LINE__);
}

static void *work(void *unused) {
    CUstream from, to;
    CUdeviceptr device;
    void *host;
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuStreamCreate(&from, 1));
    CHECK(cuStreamCreate(&to, 0));
    for (int round = 1; round <= ROUNDS; round++) {
        CHECK(cuMemHostAlloc(&host, BYTES, 0)); // in each round: the tables change while streams read them
        CHECK(cuMemAlloc_v2(&device, BYTES));
        ((unsigned char *)host)[0] = (unsigned char)round;
        round_trip(from, to, host, device, round);
        CHECK(cuMemFree_v2(device));
        CHECK(cuMemFreeHost(host));
    }
    CHECK(cuStreamDestroy_v2(from));
    CHECK(cuStreamDestroy_v2(to));
    return unused;
}

int main(void) {
    pthread_t threads[THREADS];
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    for (int each = 0; each < THREADS; each++) pthread_create(&threads[each], NULL, work, NULL);
    for (int each = 0; each < THREADS; each++) pthread_join(threads[each], NULL);
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuCtxSynchronize());
    CHECK(cuDevicePrimaryCtxRelease_v2(0));
    puts("done");
    return 0;
}
