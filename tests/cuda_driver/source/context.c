// Primary contexts, and which one is current to a thread. There is no cuCtxCreate: an engine's memory lives in the
// primary context, and a context of one's own does not see it.
#include "fake_cuda.h"

#include <stdio.h>
#include <string.h>

static Context primaries[MAX_DEVICES];
enum { STACK_ROOM = 16 };
static _Thread_local Context *stack[STACK_ROOM];
static _Thread_local int depth;

Context *context_current(void) { return depth == 0 ? NULL : stack[depth - 1]; }

CUresult context_check(void) {
    Context *context = context_current();
    if (context == NULL) return refuse(CUDA_ERROR_INVALID_CONTEXT, "no context is current to this thread");
    if (!context->alive)
        return refuse(CUDA_ERROR_CONTEXT_IS_DESTROYED, "the primary context was released by all that retained it");
    if (context->sticky != CUDA_SUCCESS)
        return refuse(context->sticky, "an earlier failure in this context stays for the life of the process");
    return CUDA_SUCCESS;
}

void context_poison(Context *context, CUresult error) {
    if (context->sticky == CUDA_SUCCESS) context->sticky = error;
    pthread_cond_broadcast(&driver_changed);
}

static Context *known(CUcontext handle) {
    for (int each = 0; each < MAX_DEVICES; each++)
        if (handle == &primaries[each]) return &primaries[each];
    return NULL;
}

static CUresult retain(CUcontext *context, CUdevice device) {
    if (context == NULL)
        return refuse(CUDA_ERROR_INVALID_VALUE, "cuDevicePrimaryCtxRetain needs a place for the context");
    if (!device_valid(device)) return refuse(CUDA_ERROR_INVALID_DEVICE, "this process sees no device %d", device);
    if (device_is_lost(device_physical(device)))
        return refuse(CUDA_ERROR_UNKNOWN, "device %d has fallen off the bus", device);
    if (!device_claim(device_physical(device)))
        return refuse(CUDA_ERROR_DEVICE_UNAVAILABLE, "the compute mode %d of device %d gives this process no context",
                      settings.compute_mode, device);
    primaries[device].device = device;
    primaries[device].alive = true;
    primaries[device].references++;
    *context = &primaries[device];
    return CUDA_SUCCESS;
}

static void destroy(Context *context) {
    context->references = 0;
    context->alive = false;
    context->life++;
    streams_abandon(context);
    allocations_drop(device_physical(context->device));
    device_unclaim(device_physical(context->device));
    host_regions_clear();
}

static CUresult release(CUdevice device) {
    if (!device_valid(device)) return refuse(CUDA_ERROR_INVALID_DEVICE, "this process sees no device %d", device);
    if (primaries[device].references == 0)
        return refuse(CUDA_ERROR_INVALID_CONTEXT, "the primary context was released more often than retained");
    if (--primaries[device].references == 0) destroy(&primaries[device]);
    return CUDA_SUCCESS;
}

static CUresult reset(CUdevice device) {
    if (!device_valid(device)) return refuse(CUDA_ERROR_INVALID_DEVICE, "this process sees no device %d", device);
    if (primaries[device].alive) destroy(&primaries[device]);
    return CUDA_SUCCESS;
}

static CUresult set_current(CUcontext handle) {
    if (handle != NULL && known(handle) == NULL) return refuse(CUDA_ERROR_INVALID_CONTEXT, "there is no such context");
    if (depth > 0) depth--;
    if (handle != NULL) stack[depth++] = known(handle);
    return CUDA_SUCCESS;
}

static CUresult push(CUcontext handle) {
    if (known(handle) == NULL) return refuse(CUDA_ERROR_INVALID_CONTEXT, "there is no such context");
    if (depth == STACK_ROOM) return refuse(CUDA_ERROR_INVALID_VALUE, "the stack of contexts is full");
    stack[depth++] = known(handle);
    return CUDA_SUCCESS;
}

static CUresult pop(CUcontext *handle) {
    if (depth == 0) return refuse(CUDA_ERROR_INVALID_CONTEXT, "no context is current to this thread");
    depth--;
    if (handle != NULL) *handle = stack[depth];
    return CUDA_SUCCESS;
}

static CUresult give_current(CUcontext *handle) {
    if (handle == NULL) return refuse(CUDA_ERROR_INVALID_VALUE, "cuCtxGetCurrent needs a place for the context");
    *handle = context_current();
    return CUDA_SUCCESS;
}

static CUresult give_device(CUdevice *device) {
    if (device == NULL) return refuse(CUDA_ERROR_INVALID_VALUE, "cuCtxGetDevice needs a place for the device");
    *device = context_current()->device;
    return CUDA_SUCCESS;
}

static CUresult give_state(CUdevice device, unsigned *flags, int *active) {
    if (!device_valid(device)) return refuse(CUDA_ERROR_INVALID_DEVICE, "this process sees no device %d", device);
    if (flags == NULL || active == NULL) return refuse(CUDA_ERROR_INVALID_VALUE, "both results need a place");
    *flags = primaries[device].flags;
    *active = primaries[device].alive;
    return CUDA_SUCCESS;
}

static CUresult set_flags(CUdevice device, unsigned flags) {
    if (!device_valid(device)) return refuse(CUDA_ERROR_INVALID_DEVICE, "this process sees no device %d", device);
    primaries[device].flags = flags;
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CALL(NEEDS_INIT, retain(context, device), NULL, "\"device\":%d", device);
}
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    CALL(NEEDS_INIT, release(device), NULL, "\"device\":%d", device);
}
API CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    CALL(NEEDS_INIT, reset(device), NULL, "\"device\":%d", device);
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    CALL(NEEDS_INIT, give_state(device, flags, active), NULL, "\"device\":%d", device);
}
API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
    CALL(NEEDS_INIT, set_flags(device, flags), NULL, "\"device\":%d,\"flags\":%u", device, flags);
}
API CUresult cuCtxSetCurrent(CUcontext context) {
    CALL(NEEDS_INIT, set_current(context), NULL, "\"context\":%zu", (size_t)context);
}
API CUresult cuCtxGetCurrent(CUcontext *context) { CALL(NEEDS_INIT, give_current(context), NULL, "%s", ""); }
API CUresult cuCtxPushCurrent_v2(CUcontext context) {
    CALL(NEEDS_INIT, push(context), NULL, "\"context\":%zu", (size_t)context);
}
API CUresult cuCtxPopCurrent_v2(CUcontext *context) { CALL(NEEDS_INIT, pop(context), NULL, "%s", ""); }
API CUresult cuCtxGetDevice(CUdevice *device) { CALL(NEEDS_CONTEXT, give_device(device), NULL, "%s", ""); }
API CUresult cuCtxSynchronize(void) { CALL(NEEDS_CONTEXT, streams_finish(context_current()), NULL, "%s", ""); }
