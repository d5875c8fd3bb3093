// What the machine itself allows: the copies and sockets under every RPC, without one.
//
//   rpc_limits KIND SIZE SECONDS      KIND: memcpy, vm_readv, ring, unix, tcp
//
// prints GB/s of messages of SIZE bytes "one way" (the next when the last was acknowledged), "echo"
// (bytes of both ways) and "pipelined" (IN_FLIGHT of them), as far as the kind has them; for sockets
// also the median and 99th percentile of a round trip of 8 bytes, in microseconds. Buffers are warm.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { IN_FLIGHT = 4, SLOTS = 8, CHUNK = 64 << 10, MAX_SAMPLES = 1 << 20 };
enum mode { ONE_WAY, ECHO, PIPELINED };

static void die(const char* what) {
  perror(what);
  exit(1);
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static char* warm(size_t size) {
  char* memory = aligned_alloc(64, (size + 63) / 64 * 64);
  if (memory == NULL) die("aligned_alloc");
  memset(memory, 1, size);
  return memory;
}

static pid_t start_child(void) {
  const pid_t child = fork();
  if (child < 0) die("fork");
  if (child == 0) prctl(PR_SET_PDEATHSIG, SIGKILL);
  return child;
}

static void end_child(pid_t child) {
  kill(child, SIGKILL);
  waitpid(child, NULL, 0);
}

// --- sockets

static void connect_pair(int tcp, int fds[2]) {
  if (!tcp) {
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, fds) != 0) die("socketpair");
    return;
  }
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in address = {.sin_family = AF_INET,
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof address;
  if (bind(listener, (struct sockaddr*)&address, length) != 0 || listen(listener, 1) != 0 ||
      getsockname(listener, (struct sockaddr*)&address, &length) != 0) {
    die("listen");
  }
  fds[0] = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(fds[0], (struct sockaddr*)&address, length) != 0) die("connect");
  fds[1] = accept(listener, NULL, NULL);
  close(listener);
  const int on = 1;
  for (int i = 0; i < 2; ++i) setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

static void write_all(int fd, const char* data, size_t size) {
  while (size > 0) {
    const ssize_t count = write(fd, data, size);
    if (count <= 0) die("write");
    data += count;
    size -= (size_t)count;
  }
}

static void read_all(int fd, char* data, size_t size) {
  while (size > 0) {
    const ssize_t count = read(fd, data, size);
    if (count <= 0) die("read");
    data += count;
    size -= (size_t)count;
  }
}

static pid_t start_receiver(int tcp, size_t size, enum mode mode, int* fd) {
  int fds[2];
  connect_pair(tcp, fds);
  const pid_t child = start_child();
  if (child != 0) {
    close(fds[1]);
    *fd = fds[0];
    return child;
  }
  char* memory = warm(size);
  for (;;) {
    read_all(fds[1], memory, size);
    write_all(fds[1], memory, mode == ECHO ? size : 1);
  }
}

static double socket_rate(int tcp, size_t size, enum mode mode, double seconds) {
  int fd = -1;
  const pid_t child = start_receiver(tcp, size, mode, &fd);
  char* memory = warm(size);
  size_t sent = 0;
  size_t answered = 0;
  const size_t window = mode == PIPELINED ? IN_FLIGHT : 1;
  const size_t answer = mode == ECHO ? size : 1;
  const double start = now();
  double elapsed = 0;
  while ((elapsed = now() - start) < seconds || answered < sent) {
    if (elapsed < seconds && sent - answered < window) {
      write_all(fd, memory, size);
      ++sent;
      if (sent - answered < window) continue;
    }
    read_all(fd, memory, answer);
    ++answered;
  }
  end_child(child);
  close(fd);
  free(memory);
  return (double)(sent * size) * (mode == ECHO ? 2 : 1) / elapsed / 1e9;
}

static int compare(const void* a, const void* b) {
  const double difference = *(const double*)a - *(const double*)b;
  return (difference > 0) - (difference < 0);
}

static void print_round_trip(int tcp, double seconds) {
  int fd = -1;
  char memory[8] = {0};
  const pid_t child = start_receiver(tcp, sizeof memory, ECHO, &fd);
  double* samples = malloc(MAX_SAMPLES * sizeof *samples);
  if (samples == NULL) die("malloc");
  size_t count = 0;
  const double end = now() + seconds;
  for (double start = now(); start < end && count < MAX_SAMPLES; ++count) {
    write_all(fd, memory, sizeof memory);
    read_all(fd, memory, sizeof memory);
    const double done = now();
    samples[count] = done - start;
    start = done;
  }
  end_child(child);
  close(fd);
  qsort(samples, count, sizeof *samples, compare);
  printf("\"p50 us\": %g, \"p99 us\": %g, ", samples[count / 2] * 1e6,
         samples[count * 99 / 100] * 1e6);
  free(samples);
}

// --- memory

// Chunks through shared memory: the sender copies in, the receiver copies out.
struct ring {
  _Alignas(64) _Atomic size_t written;
  _Alignas(64) _Atomic size_t read;
  _Alignas(64) char slots[SLOTS][CHUNK];
};

static void wait_while(_Atomic size_t* counter, size_t below) {
  for (int spins = 0; atomic_load_explicit(counter, memory_order_acquire) < below; ++spins) {
    if (spins > 1000) sched_yield();  // the other side may want this core
  }
}

static size_t chunk_size(size_t size, size_t at) {
  return size - at < CHUNK ? size - at : CHUNK;
}

static double ring_rate(size_t size, enum mode mode, double seconds) {
  struct ring* ring = mmap(NULL, sizeof *ring, PROT_READ | PROT_WRITE,
                           MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (ring == MAP_FAILED) die("mmap");
  const pid_t child = start_child();
  char* memory = warm(size);
  if (child == 0) {
    for (size_t next = 0;;) {
      for (size_t at = 0; at < size; at += CHUNK, ++next) {
        wait_while(&ring->written, next + 1);
        memcpy(memory + at, ring->slots[next % SLOTS], chunk_size(size, at));
        atomic_store_explicit(&ring->read, next + 1, memory_order_release);
      }
    }
  }
  size_t sent = 0;
  size_t next = 0;
  const double start = now();
  double elapsed = 0;
  while ((elapsed = now() - start) < seconds || sent == 0) {
    for (size_t at = 0; at < size; at += CHUNK, ++next) {
      if (next >= SLOTS) wait_while(&ring->read, next + 1 - SLOTS);
      memcpy(ring->slots[next % SLOTS], memory + at, chunk_size(size, at));
      atomic_store_explicit(&ring->written, next + 1, memory_order_release);
    }
    ++sent;
    if (mode == ONE_WAY) wait_while(&ring->read, next);
  }
  wait_while(&ring->read, next);
  elapsed = now() - start;
  end_child(child);
  munmap(ring, sizeof *ring);
  free(memory);
  return (double)(sent * size) / elapsed / 1e9;
}

// One copy: within the process, or out of another one's memory.
static double copy_rate(int from_other, size_t size, double seconds) {
  char* from = warm(size);
  const pid_t child = from_other ? start_child() : -1;
  if (child == 0) {
    for (;;) pause();
  }
  char* to = warm(size);  // after the fork, which makes every page fault once more
  size_t copied = 0;
  const double start = now();
  double elapsed = 0;
  while ((elapsed = now() - start) < seconds || copied == 0) {
    if (from_other) {
      for (size_t at = 0; at < size;) {
        const struct iovec local = {to + at, size - at};
        const struct iovec remote = {from + at, size - at};
        const ssize_t count = process_vm_readv(child, &local, 1, &remote, 1, 0);
        if (count <= 0) die("process_vm_readv");
        at += (size_t)count;
      }
    } else {
      memcpy(to, from, size);
      __asm__ volatile("" ::"r"(to) : "memory");  // the copy is wanted
    }
    ++copied;
  }
  if (from_other) end_child(child);
  return (double)(copied * size) / elapsed / 1e9;
}

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const char* kind = argv[1];
  const size_t size = strtoull(argv[2], NULL, 10);
  const double seconds = strtod(argv[3], NULL);
  const int tcp = strcmp(kind, "tcp") == 0;
  printf("{");
  if (tcp || strcmp(kind, "unix") == 0) {
    print_round_trip(tcp, seconds);
    printf("\"echo\": %g, ", socket_rate(tcp, size, ECHO, seconds));
    printf("\"pipelined\": %g, ", socket_rate(tcp, size, PIPELINED, seconds));
    printf("\"one way\": %g}\n", socket_rate(tcp, size, ONE_WAY, seconds));
  } else if (strcmp(kind, "ring") == 0) {
    printf("\"pipelined\": %g, ", ring_rate(size, PIPELINED, seconds));
    printf("\"one way\": %g}\n", ring_rate(size, ONE_WAY, seconds));
  } else {
    printf("\"one way\": %g}\n", copy_rate(strcmp(kind, "vm_readv") == 0, size, seconds));
  }
  return 0;
}
