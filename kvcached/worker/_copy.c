/* Many copies in one call, without the GIL: the optional native half of batch_copy.py.
 *
 * The C library writes past the caches only in a copy that is larger than they are, so that scattered pieces, which
 * come to far more in sum, would have every line of the destination read before it is overwritten: 0.5 to 0.7 of the
 * speed of one large copy. So pieces of some pages are streamed here.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

/* As in the packed array: offsets from the two bases, and a size, in bytes. */
typedef struct {
    int64_t destination, source, size;
} piece;

static void
copy_each(const piece *each, const piece *end, char *destination, const char *source)
{
    for (; each < end; each++)
        memcpy(destination + each->destination, source + each->source, (size_t)each->size);
}

#ifdef __x86_64__
enum { LINE_BYTES = 64, STREAMED_BYTES_MIN = 4096, PREFETCHED_BYTES = 512 };

/* Of at least STREAMED_BYTES_MIN. */
__attribute__((target("avx"))) static inline void
stream(char *destination, const char *source, size_t size)
{
    size_t head = -(uintptr_t)destination % LINE_BYTES;
    memcpy(destination, source, head);
    destination += head, source += head, size -= head;
    for (; size >= LINE_BYTES; destination += LINE_BYTES, source += LINE_BYTES, size -= LINE_BYTES) {
        __m256i low = _mm256_loadu_si256((const __m256i *)source);
        __m256i high = _mm256_loadu_si256((const __m256i *)(source + sizeof low));
        _mm256_stream_si256((__m256i *)destination, low);
        _mm256_stream_si256((__m256i *)(destination + sizeof low), high);
    }
    memcpy(destination, source, size);
}

__attribute__((target("avx"))) static void
stream_each(const piece *each, const piece *end, char *destination, const char *source)
{
    for (; each < end; each++) {
        /* The hardware foresees the next line of a piece, but not the next piece. */
        if (each + 1 < end)
            for (int64_t ahead = 0; ahead < PREFETCHED_BYTES && ahead < each[1].size; ahead += LINE_BYTES)
                _mm_prefetch(source + each[1].source + ahead, _MM_HINT_NTA);
        if (each->size >= STREAMED_BYTES_MIN)
            stream(destination + each->destination, source + each->source, (size_t)each->size);
        else
            memcpy(destination + each->destination, source + each->source, (size_t)each->size);
    }
    _mm_sfence(); /* streamed stores become visible in no order; whatever is told of them comes after this */
}
#endif

PyDoc_STRVAR(copy_all_doc,
             "copy_all(pieces, destination, source, /)\n--\n\n"
             "Copy pieces of memory that do not overlap.\n\n"
             "pieces: int64 triples (offset from destination, offset from source, size), aligned to 8 bytes.\n"
             "destination, source: addresses.\n"
             "Raises ValueError where pieces is no array of triples. Addresses are the caller's word.");

static PyObject *
copy_all(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer pieces;
    unsigned long long destination, source;

    if (!PyArg_ParseTuple(args, "y*KK:copy_all", &pieces, &destination, &source))
        return NULL;
    if (pieces.len % (Py_ssize_t)sizeof(piece) || (pieces.len && (uintptr_t)pieces.buf % sizeof(int64_t))) {
        PyErr_Format(PyExc_ValueError, "%zd bytes are no aligned triples of int64", pieces.len);
        PyBuffer_Release(&pieces);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    const piece *first = pieces.buf, *end = first + pieces.len / (Py_ssize_t)sizeof(piece);
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx"))
        stream_each(first, end, (char *)(uintptr_t)destination, (const char *)(uintptr_t)source);
    else
#endif
        copy_each(first, end, (char *)(uintptr_t)destination, (const char *)(uintptr_t)source);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&pieces);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy_all", copy_all, METH_VARARGS, copy_all_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_native_copy",
    .m_doc = "Copies in bulk; see batch_copy.py.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__native_copy(void)
{
    return PyModuleDef_Init(&definition);
}
