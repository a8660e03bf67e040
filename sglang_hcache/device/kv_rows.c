/* K and V rows into the paged pool, K rotated on the way: one pass over memory that the model's own operations need
 * eight for. Every product and difference is rounded as those operations round it, so the results are the same bits.
 * And out of the pool, all layers in one call.
 *
 * Slot numbers have 64 bits; strides count elements; count is of rows. */

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

typedef union { float value; uint32_t bits; } word;

static inline float load_bf16(uint16_t x) { word w; w.bits = (uint32_t)x << 16; return w.value; }

/* To nearest, ties to even, the low half of the bits undefined; the pool never holds what is not a number. */
static inline uint32_t nearest_bf16(float x) { word w; w.value = x; return w.bits + 0x7fffu + ((w.bits >> 16) & 1u); }
static inline uint16_t store_bf16(float x) { return (uint16_t)(nearest_bf16(x) >> 16); }
static inline float round_bf16(float x) { word w; w.bits = nearest_bf16(x) & 0xffff0000u; return w.value; }

static inline float load_f32(float x) { return x; }
static inline float store_f32(float x) { return x; }
static inline float round_f32(float x) { return x; }

/* Past the caches: nobody reads what is written before all layers are there, and a line that is written whole need not
 * be read first. */
static inline void write_past_caches(void *restrict to, const void *restrict from, int64_t size) {
#ifdef __SSE2__
    if ((((uintptr_t)to | (uintptr_t)size) & 15) == 0) {
        for (int64_t i = 0; i < size; i += 16)
            _mm_stream_si128((__m128i *)((char *)to + i), _mm_loadu_si128((const __m128i *)((const char *)from + i)));
        return;
    }
#endif
    memcpy(to, from, size);
}

/* Before the thread says that it is done. */
static inline void finish_writes(void) {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

/* table: (positions, dim), the cosines of dim / 2 angles, then their sines, of the rows' own type; dim <= MOST_DIM, which
 * whoever compiles this defines. */
#define ROTATE_AND_STORE(NAME, TYPE, LOAD, ROUND, STORE)                                                               \
    void NAME(const TYPE *restrict key, int64_t key_stride, const TYPE *restrict value, int64_t value_stride,         \
              const TYPE *restrict table, const int64_t *restrict positions, const int64_t *restrict slots,           \
              TYPE *restrict key_pool, TYPE *restrict value_pool, int64_t heads, int64_t dim, int64_t count) {        \
        const int64_t half = dim / 2, width = heads * dim;                                                            \
        float cosines[MOST_DIM / 2], sines[MOST_DIM / 2];                                                             \
        TYPE rotated[MOST_DIM];                                                                                       \
        for (int64_t row = 0; row < count; row++) {                                                                   \
            const TYPE *restrict angles = table + positions[row] * dim;                                               \
            for (int64_t i = 0; i < half; i++) {                                                                      \
                cosines[i] = LOAD(angles[i]);                                                                         \
                sines[i] = LOAD(angles[half + i]);                                                                    \
            }                                                                                                         \
            for (int64_t head = 0; head < heads; head++) {                                                            \
                const TYPE *restrict low = key + row * key_stride + head * dim, *restrict high = low + half;          \
                for (int64_t i = 0; i < half; i++) {                                                                  \
                    const float x = LOAD(low[i]), y = LOAD(high[i]), c = cosines[i], s = sines[i];                    \
                    rotated[i] = STORE(ROUND(x * c) - ROUND(y * s));                                                  \
                    rotated[half + i] = STORE(ROUND(y * c) + ROUND(x * s));                                           \
                }                                                                                                     \
                write_past_caches(key_pool + slots[row] * width + head * dim, rotated, dim * sizeof(TYPE));           \
            }                                                                                                         \
            write_past_caches(value_pool + slots[row] * width, value + row * value_stride, width * sizeof(TYPE));     \
        }                                                                                                             \
        finish_writes();                                                                                              \
    }

ROTATE_AND_STORE(rotate_and_store_bf16, uint16_t, load_bf16, round_bf16, store_bf16)
ROTATE_AND_STORE(rotate_and_store_f32, float, load_f32, round_f32, store_f32)

/* rows: (any, 2 * row_bytes), K first; places: which of them, in the order of their slots. Pools of rows of row_bytes. */
void store_rows(const char *restrict rows, const int64_t *restrict places, const int64_t *restrict slots,
                char *restrict key_pool, char *restrict value_pool, int64_t row_bytes, int64_t count) {
    for (int64_t row = 0; row < count; row++) {
        const char *both = rows + 2 * places[row] * row_bytes;
        write_past_caches(key_pool + slots[row] * row_bytes, both, row_bytes);
        write_past_caches(value_pool + slots[row] * row_bytes, both + row_bytes, row_bytes);
    }
    finish_writes();
}

/* into: (layers, count, 2 * row_bytes), K first; keys, values: where each layer's pool begins, rows of row_bytes. */
void gather_rows(char *restrict into, const char *const *keys, const char *const *values,
                 const int64_t *restrict slots, int64_t row_bytes, int64_t layers, int64_t count) {
    for (int64_t layer = 0; layer < layers; layer++) {
        for (int64_t row = 0; row < count; row++, into += 2 * row_bytes) {
            write_past_caches(into, keys[layer] + slots[row] * row_bytes, row_bytes);
            write_past_caches(into + row_bytes, values[layer] + slots[row] * row_bytes, row_bytes);
        }
    }
    finish_writes();
}
