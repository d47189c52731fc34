/* BLAS shim. It forwards the three matrix products that libmlx.so takes from a BLAS to another
 * library.
 *
 * Knows: the CBLAS interface, dlopen. Must not know: MLX, Python, the choice of the library.
 *
 * If a library is opened with RTLD_GLOBAL before libmlx.so, its symbols replace those of the BLAS
 * in MLX's wheel. MLX needs symbol names that some libraries lack. For example, PyPI's
 * scipy-openblas32 prefixes each name with `scipy_`. A library that is opened globally also
 * replaces all other names that it exports. Therefore only this shim is opened globally. It exports
 * three names and forwards them to the real library. models/cpu_backend.py calls
 * `mlxrunner_blas_open` once and makes this library global only if the call succeeds, so no product
 * can be called before. */

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

/* With at most this many rows, each row is multiplied as a vector. A matrix product packs the
 * right-hand matrix first and takes longer, at any size. PLAIN: the matrix is stored [in, out].
 * TRANSPOSED: the matrix is stored [out, in]. */
enum { MAX_GEMV_ROWS_PLAIN = 2, MAX_GEMV_ROWS_TRANSPOSED = 4 };

/* A BLAS with 64-bit integers has a different interface. models/cpu_backend.py does not open such a
 * BLAS. */
typedef void sgemm_function(
    int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
    const float* b, int ldb, float beta, float* c, int ldc);
typedef void dgemm_function(
    int order, int trans_a, int trans_b, int m, int n, int k, double alpha, const double* a,
    int lda, const double* b, int ldb, double beta, double* c, int ldc);
typedef void cgemm_function(
    int order, int trans_a, int trans_b, int m, int n, int k, const void* alpha, const void* a,
    int lda, const void* b, int ldb, const void* beta, void* c, int ldc);
typedef void sgemv_function(
    int order, int trans, int m, int n, float alpha, const float* a, int lda, const float* x,
    int incx, float beta, float* y, int incy);

/* written once before this library is global, and read-only afterwards */
static struct {
  sgemm_function* sgemm;
  dgemm_function* dgemm;
  cgemm_function* cgemm;
  sgemv_function* sgemv;
} real_blas;

static atomic_ulong num_calls;

static void* find_symbol(void* library, const char* prefix, const char* name) {
  char symbol[64];
  int length = snprintf(symbol, sizeof symbol, "%s%s", prefix, name);
  return length > 0 && (size_t)length < sizeof symbol ? dlsym(library, symbol) : NULL;
}

/* Opens the real library. Returns 0, or -1 with a message in `error`. prefix: the prefix of the
 * library's symbols, which is usually "". */
int mlxrunner_blas_open(const char* path, const char* prefix, char* error, size_t error_size) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    snprintf(error, error_size, "%s", dlerror());
    return -1;
  }
  void* symbols[4] = {
      find_symbol(library, prefix, "cblas_sgemm"),
      find_symbol(library, prefix, "cblas_dgemm"),
      find_symbol(library, prefix, "cblas_cgemm"),
      find_symbol(library, prefix, "cblas_sgemv"),
  };
  for (int i = 0; i < 4; i++)
    if (symbols[i] == NULL) {
      snprintf(error, error_size, "%s has no CBLAS", path);
      dlclose(library);
      return -1;
    }
  /* ISO C has no conversion from void* to a function pointer, but POSIX guarantees equal
   * representations */
  memcpy(&real_blas.sgemm, &symbols[0], sizeof symbols[0]);
  memcpy(&real_blas.dgemm, &symbols[1], sizeof symbols[1]);
  memcpy(&real_blas.cgemm, &symbols[2], sizeof symbols[2]);
  memcpy(&real_blas.sgemv, &symbols[3], sizeof symbols[3]);
  return 0;
}

/* Returns the number of products that used this shim. It shows that MLX's own BLAS is not in
 * use. */
unsigned long mlxrunner_blas_calls(void) {
  return atomic_load_explicit(&num_calls, memory_order_relaxed);
}

void cblas_sgemm(
    int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
    const float* b, int ldb, float beta, float* c, int ldc) {
  atomic_fetch_add_explicit(&num_calls, 1, memory_order_relaxed);
  int transposed = trans_b == TRANS;
  /* sgemv without columns does not change y, but sgemm with k = 0 multiplies it by beta */
  if (order != ROW_MAJOR ||
      m > (transposed ? MAX_GEMV_ROWS_TRANSPOSED : MAX_GEMV_ROWS_PLAIN) || k < 1 || n < 1) {
    real_blas.sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    return;
  }
  /* row i of op(a) begins at a + i * row_stride, and its elements are `step` apart */
  size_t row_stride = trans_a == NO_TRANS ? (size_t)lda : 1;
  int step = trans_a == NO_TRANS ? 1 : lda;
  for (size_t i = 0; i < (size_t)m; i++) {
    float* row = c + i * (size_t)ldc;
    /* the output may contain any bits, and some libraries multiply it by 0 */
    if (beta == 0) memset(row, 0, (size_t)n * sizeof *row);
    real_blas.sgemv(
        ROW_MAJOR, transposed ? NO_TRANS : TRANS, transposed ? n : k, transposed ? k : n, alpha, b,
        ldb, a + i * row_stride, step, beta, row, 1);
  }
}

void cblas_dgemm(
    int order, int trans_a, int trans_b, int m, int n, int k, double alpha, const double* a,
    int lda, const double* b, int ldb, double beta, double* c, int ldc) {
  atomic_fetch_add_explicit(&num_calls, 1, memory_order_relaxed);
  real_blas.dgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_cgemm(
    int order, int trans_a, int trans_b, int m, int n, int k, const void* alpha, const void* a,
    int lda, const void* b, int ldb, const void* beta, void* c, int ldc) {
  atomic_fetch_add_explicit(&num_calls, 1, memory_order_relaxed);
  real_blas.cgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
