/* The three products that libmlx.so asks a BLAS for, handed on to a library of our choice.
 *
 * Knows: the CBLAS interface, dlopen. Must not know: MLX, Python, which library is good.
 *
 * A library that is opened with RTLD_GLOBAL before libmlx.so answers for the BLAS that MLX's wheel
 * brings. That asks for names which some do not have (PyPI's scipy-openblas32 puts `scipy_` before
 * each), and takes over all names that the library has. So this one is what is opened globally: it
 * has three names and knows which library is behind them. models/cpu_backend.py calls
 * `mlxrunner_blas_open` once, and makes this library global only when that went well: until then
 * nobody can have called a product.
 */

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

enum { ROW_MAJOR = 101, PLAIN = 111, TURNED = 112 };

/* Rows that are multiplied one after the other, each as a vector: up to here a product of matrices,
 * which first packs the right one, takes longer, whatever its size. Down the columns of a matrix
 * that is stored [in, out], along the rows of one that is stored [out, in]. */
enum { FEW_DOWN = 2, FEW_ALONG = 4 };

/* BLAS with 64-bit integers is another interface: models/cpu_backend.py does not open one. */
typedef void real_product(
    int order, int turn_a, int turn_b, int m, int n, int k, float alpha, const float* a, int lda,
    const float* b, int ldb, float beta, float* c, int ldc);
typedef void double_product(
    int order, int turn_a, int turn_b, int m, int n, int k, double alpha, const double* a, int lda,
    const double* b, int ldb, double beta, double* c, int ldc);
typedef void complex_product(
    int order, int turn_a, int turn_b, int m, int n, int k, const void* alpha, const void* a,
    int lda, const void* b, int ldb, const void* beta, void* c, int ldc);
typedef void real_vector(
    int order, int turn, int m, int n, float alpha, const float* a, int lda, const float* x,
    int incx, float beta, float* y, int incy);

/* Written once, before this library is global; read ever after. */
static struct {
  real_product* sgemm;
  double_product* dgemm;
  complex_product* cgemm;
  real_vector* sgemv;
} behind;

static atomic_ulong calls;

static void* named(void* library, const char* prefix, const char* name) {
  char whole[64];
  int length = snprintf(whole, sizeof whole, "%s%s", prefix, name);
  return length > 0 && (size_t)length < sizeof whole ? dlsym(library, whole) : NULL;
}

/* 0, or -1 with the reason in `why`. prefix: before each name of the library, mostly "". */
int mlxrunner_blas_open(const char* path, const char* prefix, char* why, size_t room) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    snprintf(why, room, "%s", dlerror());
    return -1;
  }
  void* found[4] = {
      named(library, prefix, "cblas_sgemm"),
      named(library, prefix, "cblas_dgemm"),
      named(library, prefix, "cblas_cgemm"),
      named(library, prefix, "cblas_sgemv"),
  };
  for (int i = 0; i < 4; i++)
    if (found[i] == NULL) {
      snprintf(why, room, "%s has no CBLAS", path);
      dlclose(library);
      return -1;
    }
  /* ISO C has no conversion from void* to a function; POSIX promises that the bits are the same */
  memcpy(&behind.sgemm, &found[0], sizeof found[0]);
  memcpy(&behind.dgemm, &found[1], sizeof found[1]);
  memcpy(&behind.cgemm, &found[2], sizeof found[2]);
  memcpy(&behind.sgemv, &found[3], sizeof found[3]);
  return 0;
}

/* Products that came through here: the proof that MLX's own BLAS is out of use. */
unsigned long mlxrunner_blas_calls(void) {
  return atomic_load_explicit(&calls, memory_order_relaxed);
}

void cblas_sgemm(
    int order, int turn_a, int turn_b, int m, int n, int k, float alpha, const float* a, int lda,
    const float* b, int ldb, float beta, float* c, int ldc) {
  atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed);
  int turned = turn_b == TURNED;
  /* sgemv of no columns leaves y as it is, where sgemm of k = 0 multiplies it with beta */
  if (order != ROW_MAJOR || m > (turned ? FEW_ALONG : FEW_DOWN) || k < 1 || n < 1) {
    behind.sgemm(order, turn_a, turn_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    return;
  }
  /* row i of op(a) begins at a + i * down, and its next number is `along` further */
  size_t down = turn_a == PLAIN ? (size_t)lda : 1;
  int along = turn_a == PLAIN ? 1 : lda;
  for (size_t i = 0; i < (size_t)m; i++) {
    float* row = c + i * (size_t)ldc;
    /* what lies there may be anything, and some libraries multiply it with 0 */
    if (beta == 0) memset(row, 0, (size_t)n * sizeof *row);
    behind.sgemv(
        ROW_MAJOR, turned ? PLAIN : TURNED, turned ? n : k, turned ? k : n, alpha, b, ldb,
        a + i * down, along, beta, row, 1);
  }
}

void cblas_dgemm(
    int order, int turn_a, int turn_b, int m, int n, int k, double alpha, const double* a, int lda,
    const double* b, int ldb, double beta, double* c, int ldc) {
  atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed);
  behind.dgemm(order, turn_a, turn_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_cgemm(
    int order, int turn_a, int turn_b, int m, int n, int k, const void* alpha, const void* a,
    int lda, const void* b, int ldb, const void* beta, void* c, int ldc) {
  atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed);
  behind.cgemm(order, turn_a, turn_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
