/* Count the parallel regions that a process enters: loaded by LD_PRELOAD, in front of the runtime of OpenMP.

   Every entry of the runtimes of GCC and of LLVM by which a region begins is defined here, counts, and calls the
   runtime's own. A region inside another, or of a team that is told to be one thread, has no other thread to wait for
   and does not count. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static atomic_long regions;

long regions_begun(void) { return atomic_load(&regions); }

/* torch's runtime may lie in the scope of torch alone, where RTLD_NEXT does not look: then it is found by its file. */
static int look_into(struct dl_phdr_info *object, size_t size, void *wanted) {
  const char *file = strrchr(object->dlpi_name, '/');
  if (!file || (!strstr(file, "/libgomp") && !strstr(file, "/libiomp") && !strstr(file, "/libomp"))) return 0;
  void *library = dlopen(object->dlpi_name, RTLD_LAZY | RTLD_NOLOAD), **found = wanted;
  void *symbol = library ? dlsym(library, *found) : NULL;
  if (!symbol) return 0;
  *found = symbol;
  return 1;
}

static void *of_runtime(const char *name) {
  void *symbol = dlsym(RTLD_NEXT, name);
  if (symbol) return symbol;
  symbol = (void *)name;
  if (dl_iterate_phdr(look_into, &symbol)) return symbol;
  fprintf(stderr, "no runtime of OpenMP has %s\n", name);
  abort();
}

static void count(unsigned threads) {
  static int (*is_inside)(void);
  if (!is_inside) is_inside = (int (*)(void))of_runtime("omp_in_parallel");
  if (threads != 1 && !is_inside()) atomic_fetch_add(&regions, 1);
}

/* GCC's: (function, data, threads, ...), at most eight whole numbers or pointers; 0 threads: as many as usual. */
#define COUNTED(name)                                                                       \
  long name(long run, long data, long threads, long d, long e, long f, long g, long h) {    \
    static long (*own)(long, long, long, long, long, long, long, long);                     \
    if (!own) own = of_runtime(#name);                                                      \
    count((unsigned)threads);                                                               \
    return own(run, data, threads, d, e, f, g, h);                                          \
  }

COUNTED(GOMP_parallel)
COUNTED(GOMP_parallel_start)
COUNTED(GOMP_parallel_sections)
COUNTED(GOMP_parallel_sections_start)
COUNTED(GOMP_parallel_loop_static)
COUNTED(GOMP_parallel_loop_static_start)
COUNTED(GOMP_parallel_loop_dynamic)
COUNTED(GOMP_parallel_loop_dynamic_start)
COUNTED(GOMP_parallel_loop_guided)
COUNTED(GOMP_parallel_loop_guided_start)
COUNTED(GOMP_parallel_loop_runtime)
COUNTED(GOMP_parallel_loop_runtime_start)
COUNTED(GOMP_parallel_loop_nonmonotonic_dynamic)
COUNTED(GOMP_parallel_loop_nonmonotonic_guided)
COUNTED(GOMP_parallel_loop_nonmonotonic_runtime)
COUNTED(GOMP_parallel_loop_maybe_nonmonotonic_runtime)

/* GOMP_parallel_reductions has its number of threads in the same place. */
COUNTED(GOMP_parallel_reductions)

/* LLVM's and Intel's: (place, number, function, pointers ...). */
void __kmpc_fork_call(void *place, int number, void *run, ...) {
  enum { MOST = 24 };
  static void (*own)(void *, int, void *, ...);
  void *p[MOST] = {0};
  va_list given;
  if (!own) own = of_runtime("__kmpc_fork_call");
  if (number > MOST) abort();
  va_start(given, run);
  for (int i = 0; i < number; i++) p[i] = va_arg(given, void *);
  va_end(given);
  count(0);
  own(place, number, run, p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9], p[10], p[11], p[12], p[13],
      p[14], p[15], p[16], p[17], p[18], p[19], p[20], p[21], p[22], p[23]);
}
