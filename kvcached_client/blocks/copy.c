/* Many copies in one call, without the GIL: the optional native half of copy.py.
 *
 * copy_all:
 *
 * The C library writes past the caches only in a copy that is larger than they are, so that scattered pieces, which
 * come to far more in sum, would have every line of the destination read before it is overwritten: 0.5 to 0.7 of the
 * speed of one large copy. So pieces of some pages are streamed here.
 *
 * copy_summed:
 *
 * A checksum apart from the copy reads everything a second time. Here every 64 bytes are added to the checksum on their
 * way through the registers. It is XXH3-128 with seed 0, for lengths of whole stripes, as the specification of xxHash
 * has it: eight accumulators, to each of which a stripe adds a product of its own bytes with a secret; the secret moves
 * on by eight bytes a stripe, and after sixteen stripes the accumulators are scrambled. tests/client/test_batch_copy.py
 * compares it with the xxhash package.
 *
 * queue_each:
 *
 * Copies of rows are calls of the CUDA driver, one for each block, of about two microseconds. From Python each would
 * take the GIL again, for which threads that store and load at once would wait for each other.
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

/* The hardware foresees the next line of a piece, but not the next piece. */
static inline void
prefetch(const piece *next, const char *source)
{
    for (int64_t ahead = 0; ahead < PREFETCHED_BYTES && ahead < next->size; ahead += LINE_BYTES)
        _mm_prefetch(source + next->source + ahead, _MM_HINT_NTA);
}

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
        if (each + 1 < end)
            prefetch(each + 1, source);
        if (each->size >= STREAMED_BYTES_MIN)
            stream(destination + each->destination, source + each->source, (size_t)each->size);
        else
            memcpy(destination + each->destination, source + each->source, (size_t)each->size);
    }
    _mm_sfence(); /* streamed stores become visible in no order; whatever is told of them comes after this */
}

enum { STRIPE_BYTES = 64, STRIPES_PER_ROUND = 16, LANES = 8, SECRET_STEP = 8, SUMMED_BYTES_MIN = 256, SUM_BYTES = 16 };
/* Where in the secret: the key of scrambling, that of the last stripe, and those of the two halves of the result. */
enum { SCRAMBLE_KEY = 128, LAST_STRIPE_KEY = 121, LOW_KEY = 11, HIGH_KEY = 117 };

static const uint64_t PRIME32_1 = 0x9E3779B1U, PRIME32_2 = 0x85EBCA77U, PRIME32_3 = 0xC2B2AE3DU;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87U, PRIME64_2 = 0xC2B2AE3D27D4EB4FU,
                      PRIME64_3 = 0x165667B19E3779F9U, PRIME64_4 = 0x85EBCA77C2B2AE63U,
                      PRIME64_5 = 0x27D4EB2F165667C5U, PRIME_AVALANCHE = 0x165667919E3779F9U;

static const unsigned char SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

/* Four of the eight accumulators, with their half of a stripe and of its key. */
__attribute__((target("avx2"))) static inline __m256i
accumulate(__m256i sum, __m256i data, __m256i key)
{
    __m256i keyed = _mm256_xor_si256(data, key);
    __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    __m256i neighbours = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(sum, _mm256_add_epi64(product, neighbours));
}

__attribute__((target("avx2"))) static inline __m256i
scramble(__m256i sum, __m256i key)
{
    __m256i prime = _mm256_set1_epi64x((long long)PRIME32_1);
    __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)), key);
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
}

__attribute__((target("avx2"))) static inline __m256i
half(const void *place, size_t index)
{
    return _mm256_loadu_si256((const __m256i *)place + index);
}

static uint64_t
merge(const uint64_t *sums, const unsigned char *key, uint64_t result)
{
    for (int pair = 0; pair < LANES; pair += 2) {
        uint64_t keys[2];
        memcpy(keys, key + pair * sizeof(uint64_t), sizeof keys);
        __uint128_t product = (__uint128_t)(sums[pair] ^ keys[0]) * (sums[pair + 1] ^ keys[1]);
        result += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    result = (result ^ result >> 37) * PRIME_AVALANCHE;
    return result ^ result >> 32;
}

/* Pieces of whole stripes, SUMMED_BYTES_MIN in all; `sum` gets the checksum of their sources. */
__attribute__((target("avx2"))) static void
stream_summed(const piece *each, const piece *end, char *destination, const char *source, unsigned char *sum)
{
    uint64_t sums[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    __m256i low = half(sums, 0), high = half(sums, 1);
    uint64_t size = 0;
    for (const piece *part = each; part < end; part++)
        size += (uint64_t)part->size;
    size_t left = size / STRIPE_BYTES, stripe = 0;
    for (; each < end; each++) {
        char *to = destination + each->destination;
        const char *from = source + each->source;
        int aligned = (uintptr_t)to % LINE_BYTES == 0;
        if (each + 1 < end)
            prefetch(each + 1, source);
        for (int64_t done = 0; done < each->size; done += STRIPE_BYTES, left--) {
            __m256i first = half(from + done, 0), second = half(from + done, 1);
            if (aligned) {
                _mm256_stream_si256((__m256i *)(to + done), first);
                _mm256_stream_si256((__m256i *)(to + done) + 1, second);
            } else {
                _mm256_storeu_si256((__m256i *)(to + done), first);
                _mm256_storeu_si256((__m256i *)(to + done) + 1, second);
            }
            const unsigned char *key = SECRET + (left == 1 ? LAST_STRIPE_KEY : stripe * SECRET_STEP);
            low = accumulate(low, first, half(key, 0));
            high = accumulate(high, second, half(key, 1));
            if (++stripe == STRIPES_PER_ROUND && left != 1) {
                low = scramble(low, half(SECRET + SCRAMBLE_KEY, 0));
                high = scramble(high, half(SECRET + SCRAMBLE_KEY, 1));
                stripe = 0;
            }
        }
    }
    _mm256_storeu_si256((__m256i *)sums, low);
    _mm256_storeu_si256((__m256i *)sums + 1, high);
    uint64_t words[2] = {
        __builtin_bswap64(merge(sums, SECRET + HIGH_KEY, ~(size * PRIME64_2))),
        __builtin_bswap64(merge(sums, SECRET + LOW_KEY, size * PRIME64_1)),
    };
    memcpy(sum, words, SUM_BYTES);
}

/* Whether stream_summed takes them: groups of whole stripes, none of them too short for its branch of XXH3. */
static int
are_whole_stripes(const piece *each, const piece *end, Py_ssize_t per_sum)
{
    while (each < end) {
        uint64_t size = 0;
        for (const piece *group_end = each + per_sum; each < group_end; each++) {
            if (each->size < 0 || each->size % STRIPE_BYTES)
                return 0;
            size += (uint64_t)each->size;
        }
        if (size < SUMMED_BYTES_MIN)
            return 0;
    }
    return 1;
}

static void
stream_groups(const piece *each, const piece *end, Py_ssize_t per_sum, char *destination, const char *source,
              unsigned char *sums)
{
    for (; each < end; each += per_sum, sums += SUM_BYTES)
        stream_summed(each, each + per_sum, destination, source, sums);
    _mm_sfence();
}
#endif

/* Whether they are triples; else an exception is set. */
static int
check_triples(const Py_buffer *pieces)
{
    if (!(pieces->len % (Py_ssize_t)sizeof(piece)) && !((uintptr_t)pieces->buf % sizeof(int64_t) && pieces->len))
        return 1;
    PyErr_Format(PyExc_ValueError, "%zd bytes are no aligned triples of int64", pieces->len);
    return 0;
}

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
    if (!check_triples(&pieces)) {
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

PyDoc_STRVAR(copy_summed_doc,
             "copy_summed(pieces, per_sum, destination, source, /)\n--\n\n"
             "Copy pieces as copy_all does, and return the XXH3-128 digests of every per_sum pieces, back to back.\n\n"
             "Returns None, and has copied nothing, where this processor or these sizes take another way.\n"
             "Raises ValueError where pieces are no groups of per_sum.");

static PyObject *
copy_summed(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer pieces;
    Py_ssize_t per_sum;
    unsigned long long destination, source;
    PyObject *sums = NULL;

    if (!PyArg_ParseTuple(args, "y*nKK:copy_summed", &pieces, &per_sum, &destination, &source))
        return NULL;
    Py_ssize_t count = pieces.len / (Py_ssize_t)sizeof(piece);
    if (check_triples(&pieces)) {
        if (per_sum < 1 || count % per_sum)
            PyErr_Format(PyExc_ValueError, "%zd pieces are no groups of %zd", count, per_sum);
#ifdef __x86_64__
        else if (__builtin_cpu_supports("avx2")
                 && are_whole_stripes(pieces.buf, (const piece *)pieces.buf + count, per_sum)) {
            sums = PyBytes_FromStringAndSize(NULL, count / per_sum * SUM_BYTES);
            if (sums) {
                const piece *first = pieces.buf;
                unsigned char *out = (unsigned char *)PyBytes_AS_STRING(sums);
                Py_BEGIN_ALLOW_THREADS
                stream_groups(first, first + count, per_sum, (char *)(uintptr_t)destination,
                              (const char *)(uintptr_t)source, out);
                Py_END_ALLOW_THREADS
            }
        }
#endif
        else
            sums = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&pieces);
    return sums;
}

PyDoc_STRVAR(queue_each_doc,
             "queue_each(function, parameters, size, stream, /)\n--\n\n"
             "Call int function(void *parameters, void *stream) for every size bytes of parameters.\n\n"
             "Returns what the first call that failed gave, or 0. Nothing is called after that one.\n"
             "Raises ValueError where parameters are no multiple of size. The address is the caller's word.");

static PyObject *
queue_each(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer parameters;
    Py_ssize_t size;
    unsigned long long function, stream;
    int result = 0;

    if (!PyArg_ParseTuple(args, "Ky*nK:queue_each", &function, &parameters, &size, &stream))
        return NULL;
    if (size < 1 || parameters.len % size) {
        PyErr_Format(PyExc_ValueError, "%zd bytes are no multiple of %zd", parameters.len, size);
        PyBuffer_Release(&parameters);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    int (*call)(void *, void *) = (int (*)(void *, void *))(uintptr_t)function;
    for (char *each = parameters.buf; !result && each < (char *)parameters.buf + parameters.len; each += size)
        result = call(each, (void *)(uintptr_t)stream);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&parameters);
    return PyLong_FromLong(result);
}

static PyMethodDef methods[] = {
    {"copy_all", copy_all, METH_VARARGS, copy_all_doc},
    {"copy_summed", copy_summed, METH_VARARGS, copy_summed_doc},
    {"queue_each", queue_each, METH_VARARGS, queue_each_doc},
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
    .m_doc = "Copies in bulk; see copy.py.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__native_copy(void)
{
    return PyModuleDef_Init(&definition);
}
