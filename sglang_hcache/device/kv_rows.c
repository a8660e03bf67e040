/* K and V rows into the paged pool, K rotated on the way: one pass over memory that the model's own operations need
 * eight for. Every product and difference is rounded as those operations round it, so the results are the same bits.
 *
 * Rows of 64-bit slot numbers; strides count elements; [begin, end) are the rows that this call works on. */

#include <stdint.h>
#include <string.h>

typedef union { float value; uint32_t bits; } word;

static inline float load_bf16(uint16_t x) { word w; w.bits = (uint32_t)x << 16; return w.value; }

static inline uint16_t store_bf16(float x) { /* to nearest, ties to even; the pool never holds what is not a number */
    word w;
    w.value = x;
    return (uint16_t)((w.bits + 0x7fffu + ((w.bits >> 16) & 1u)) >> 16);
}

static inline float load_f32(float x) { return x; }
static inline float store_f32(float x) { return x; }

/* table: (positions, dim), the cosines of dim / 2 angles, then their sines, of the rows' own type. */
#define ROTATE_AND_STORE(NAME, TYPE, LOAD, STORE)                                                                      \
    void NAME(const TYPE *restrict key, int64_t key_stride, const TYPE *restrict value, int64_t value_stride,         \
              const TYPE *restrict table, const int64_t *restrict positions, const int64_t *restrict slots,           \
              TYPE *restrict key_pool, TYPE *restrict value_pool, int64_t heads, int64_t dim, int64_t begin,          \
              int64_t end) {                                                                                          \
        const int64_t half = dim / 2, width = heads * dim;                                                            \
        for (int64_t row = begin; row < end; row++) {                                                                 \
            const TYPE *restrict cosines = table + positions[row] * dim, *restrict sines = cosines + half;            \
            for (int64_t head = 0; head < heads; head++) {                                                            \
                const TYPE *restrict low = key + row * key_stride + head * dim, *restrict high = low + half;          \
                TYPE *restrict low_out = key_pool + slots[row] * width + head * dim, *restrict high_out = low_out + half; \
                for (int64_t i = 0; i < half; i++) {                                                                  \
                    const float x = LOAD(low[i]), y = LOAD(high[i]), c = LOAD(cosines[i]), s = LOAD(sines[i]);        \
                    low_out[i] = STORE(LOAD(STORE(x * c)) - LOAD(STORE(y * s)));                                      \
                    high_out[i] = STORE(LOAD(STORE(y * c)) + LOAD(STORE(x * s)));                                     \
                }                                                                                                     \
            }                                                                                                         \
            memcpy(value_pool + slots[row] * width, value + row * value_stride, width * sizeof(TYPE));                \
        }                                                                                                             \
    }

ROTATE_AND_STORE(rotate_and_store_bf16, uint16_t, load_bf16, store_bf16)
ROTATE_AND_STORE(rotate_and_store_f32, float, load_f32, store_f32)

/* rows: (n, 2 * row_bytes), K first; pools of rows of row_bytes. */
void store_rows(const char *restrict rows, const int64_t *restrict slots, char *restrict key_pool,
                char *restrict value_pool, int64_t row_bytes, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        memcpy(key_pool + slots[row] * row_bytes, rows + 2 * row * row_bytes, row_bytes);
        memcpy(value_pool + slots[row] * row_bytes, rows + (2 * row + 1) * row_bytes, row_bytes);
    }
}
