/*
 * libcost measures what libmlx5 and libmlx4 of the installed rdma-core need per work request posted and
 * per completion polled, on ordinary memory: the counterpart of the Go benchmarks in
 * internal/mlx5 and internal/mlx4. `make libcost` runs both in turn. A line is a name and nanoseconds, the median of the repetitions.
 *
 * The kernel is imitated in this process: open, stat, write, ioctl and mmap of the device file are
 * defined here and so replace the C library's for libibverbs. The ioctl answers ENOTTY, as before Linux 4.20, so every command
 * comes by write().
 *
 *	cc -O2 -rdynamic -o libcost libcost.c -libverbs -lmlx5 -lmlx4 -ldl
 *	./libcost mlx5|mlx4 DIR [N]    DIR: for a made-up sysfs; N repetitions (400)
 *	./libcost mlx5|mlx4 DIR bind   prints the work queue entries of BIND_MW instead, for edge_test.go
 *	./libcost mlx5|mlx4 DIR caps   prints the capabilities granted for those asked for
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/mlx4dv.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

static int dev_fd = -1;
static int mlx4;

static int real_open(const char *path, int flags, mode_t mode)
{
	return syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

int open(const char *path, int flags, ...)
{
	va_list ap;
	va_start(ap, flags);
	mode_t mode = va_arg(ap, int);
	va_end(ap);
	if (strcmp(path, "/dev/infiniband/uverbs0") == 0)
		return dev_fd = real_open("/dev/null", flags, 0); /* a character device, as libibverbs checks */
	return real_open(path, flags, mode);
}

int open64(const char *path, int flags, ...) __attribute__((alias("open")));

int stat(const char *path, struct stat *st)
{
	if (strncmp(path, "/dev/infiniband/", 16) == 0)
		path = "/dev/null";
	return syscall(SYS_newfstatat, AT_FDCWD, path, st, 0);
}

int stat64(const char *, struct stat64 *) __attribute__((alias("stat")));

int ioctl(int fd, unsigned long req, ...)
{
	va_list ap;
	va_start(ap, req);
	void *arg = va_arg(ap, void *);
	va_end(ap);
	if (fd == dev_fd && fd >= 0) {
		errno = ENOTTY;
		return -1;
	}
	return syscall(SYS_ioctl, fd, req, arg);
}

void *mmap(void *addr, size_t len, int prot, int flags, int fd, off_t off)
{
	if (fd == dev_fd && fd >= 0) {
		if (!(prot & PROT_WRITE)) {
			errno = EOPNOTSUPP;
			return MAP_FAILED;
		}
		fd = -1, off = 0, flags = MAP_SHARED | MAP_ANONYMOUS, prot = PROT_READ | PROT_WRITE;
	}
	return (void *)syscall(SYS_mmap, addr, len, prot, flags, fd, off);
}

void *mmap64(void *, size_t, int, int, int, off_t) __attribute__((alias("mmap")));

static void put32(uint8_t *p, uint32_t v) { memcpy(p, &v, 4); }
static void put16(uint8_t *p, uint16_t v) { memcpy(p, &v, 2); }

ssize_t write(int fd, const void *buf, size_t n)
{
	static uint32_t handle = 1, key = 0x1ee7;
	if (fd != dev_fd || fd < 0)
		return syscall(SYS_write, fd, buf, n);
	const uint8_t *b = buf;
	uint32_t cmd, words;
	uint64_t resp = 0;
	memcpy(&cmd, b, 4);
	memcpy(&words, b + 4, 4);
	if (n >= 16)
		memcpy(&resp, b + 8, 8);
	uint8_t *r = (uint8_t *)resp;
	uint32_t core, entries;
	switch (cmd) {
	case 0: /* GET_CONTEXT */
		put32(r, eventfd(0, EFD_CLOEXEC));
		put32(r + 4, 8);
		r += 8;
		if (mlx4) {
			put32(r, 0), put32(r + 4, 0x80000), put16(r + 8, 512), put16(r + 10, 8), put32(r + 12, 32);
			break;
		}
		memset(r, 0, 72);
		put32(r, 0x40000), put32(r + 4, 512), put32(r + 8, 16), put32(r + 12, 64), put16(r + 16, 1024), put16(r + 18, 512);
		put32(r + 20, 32768), put32(r + 24, 32768), put32(r + 28, 32767), put16(r + 32, 1), put32(r + 36, 3), put32(r + 40, 72);
		r[44] = 1, r[45] = 3, r[46] = 1, put32(r + 56, 12), put32(r + 60, 1), put32(r + 64, 512);
		break;
	case 0x80000001: /* EX_QUERY_DEVICE */
	case 1:
		core = cmd == 1 ? 176 : 304;
		memset(r, 0, core);
		put32(r + 40 + 12, 0x40000), put32(r + 40 + 16, mlx4 ? 16351 : 32768), put32(r + 40 + 24, 30);
		r[171] = 1; /* port */
		break;
	case 2: /* QUERY_PORT */
		memset(r, 0, 40);
		r[28] = 4, r[29] = 5, r[30] = 5;
		break;
	case 3: /* ALLOC_PD */
		put32(r, handle++), put32(r + 4, 1);
		break;
	case 9: /* REG_MR */
		put32(r, handle++), put32(r + 4, key << 8), put32(r + 8, key << 8);
		key++;
		break;
	case 14: /* ALLOC_MW */
		put32(r, handle++), put32(r + 4, key++ << 8);
		break;
	case 18: /* CREATE_CQ */
		memcpy(&entries, b + 8 + 16, 4);
		put32(r, handle++), put32(r + 4, entries), put32(r + 8, 0x400);
		if (mlx4) { /* the kernel gives the entries to the adapter */
			uint64_t ring;
			memcpy(&ring, b + 8 + 32, 8);
			memset((void *)ring, 0xcc, (entries + 1) * 32);
		}
		break;
	case 24: /* CREATE_QP */
		put32(r, handle++), put32(r + 4, 0x1a3);
		memcpy(r + 8, b + 8 + 32, 20);
		put32(r + 28, 0);
		if (!mlx4) {
			memset(r + 32, 0, 40);
			put32(r + 32, 24); /* register */
		}
		break;
	}
	return n;
}

static void file(const char *dir, const char *name, const char *text)
{
	char path[512];
	snprintf(path, sizeof path, "%s/%s", dir, name);
	for (char *p = path + 1; *p; p++)
		if (*p == '/') {
			*p = 0;
			mkdir(path, 0755);
			*p = '/';
		}
	int fd = real_open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
	if (fd < 0 || syscall(SYS_write, fd, text, strlen(text)) < 0) {
		perror(path);
		exit(1);
	}
	close(fd);
}

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

static struct ibv_qp *qp;
static struct ibv_cq *cq;
static uint8_t *ring;
static uint32_t entries, pi;
static uint8_t mem[1 << 20] __attribute__((aligned(4096)));

/* complete writes the CQE of a send at the given index. */
static void complete(uint32_t index, uint8_t op)
{
	if (mlx4) {
		uint8_t *e = ring + (pi & (entries - 1)) * 32;
		memset(e, 0, 31);
		e[2] = 1, e[3] = 0xa3, e[24] = index >> 8, e[25] = index;
		e[31] = 0x40 | op | (pi & entries ? 0x80 : 0);
	} else {
		uint8_t *e = ring + (pi & (entries - 1)) * 64;
		memset(e, 0, 63);
		e[56] = op, e[58] = 1, e[59] = 0xa3, e[60] = index >> 8, e[61] = index;
		e[63] = pi & entries ? 1 : 0;
	}
	pi++;
}

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

enum { ROUND = 1024, REPEAT = 10000 };

static int repeat = 400;

static int cmp(const void *a, const void *b)
{
	double x = *(double *)a, y = *(double *)b;
	return x < y ? -1 : x > y;
}

static void report(const char *name, double *t, int n)
{
	qsort(t, n, sizeof *t, cmp);
	printf("%s %.2f\n", name, t[n / 2]);
}

/* post times ROUND requests in chains of batch, and the polls that retire them. */
static void post(const char *name, struct ibv_send_wr *proto, int batch, uint8_t op, int blocks)
{
	static uint32_t index;
	static double tp[REPEAT], tc[REPEAT];
	struct ibv_send_wr wr[64], *bad;
	struct ibv_sge sge[64];
	struct ibv_wc wc[16];
	for (int i = 0; i < batch; i++) {
		wr[i] = *proto;
		sge[i] = *proto->sg_list;
		wr[i].sg_list = &sge[i];
		wr[i].next = i + 1 < batch ? &wr[i + 1] : NULL;
	}
	for (int k = 0; k < repeat; k++) {
		double t = now();
		for (int i = 0; i < ROUND; i += batch)
			if (ibv_post_send(qp, wr, &bad))
				fail("ibv_post_send");
		tp[k] = (now() - t) / ROUND;
		for (int i = 0; i < ROUND; i++, index += blocks)
			complete(index, op);
		t = now();
		for (int left = ROUND; left > 0;) {
			int n = ibv_poll_cq(cq, 16, wc);
			if (n <= 0 || wc[0].status)
				fail("ibv_poll_cq");
			left -= n;
		}
		tc[k] = (now() - t) / ROUND;
	}
	char line[64];
	snprintf(line, sizeof line, "%s/batch%d", name, batch);
	report(line, tp, repeat);
	if (batch == 16 && proto->opcode == IBV_WR_SEND && !(proto->send_flags & IBV_SEND_INLINE))
		report("poll", tc, repeat);
}

static void print(uint8_t *w)
{
	for (int k = 0; k < (w[7] & 0x3f) * 16; k++)
		printf("%02x", w[k]);
	printf("\n");
}

/* bind prints the entries of four BIND_MW requests and of the LOCAL_INV of the last key. */
static void bind(struct ibv_pd *pd)
{
	void *at = (void *)0x100000000000;
	at = mmap(at, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	struct ibv_mr *mr = ibv_reg_mr(pd, at, 1 << 20, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND);
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	if (at == MAP_FAILED || !mr || !mw)
		fail("region or window");
	uint8_t *sq;
	int stride;
	if (mlx4) {
		struct mlx4dv_qp d = {0};
		struct mlx4dv_obj o = {.qp = {.in = qp, .out = &d}};
		if (mlx4dv_init_obj(&o, MLX4DV_OBJ_QP))
			fail("mlx4dv_init_obj");
		sq = (uint8_t *)d.buf.buf + d.sq.offset, stride = 1 << d.sq.wqe_shift;
	} else {
		struct mlx5dv_qp d = {0};
		struct mlx5dv_obj o = {.qp = {.in = qp, .out = &d}};
		if (mlx5dv_init_obj(&o, MLX5DV_OBJ_QP))
			fail("mlx5dv_init_obj");
		sq = d.sq.buf, stride = 192;
	}
	static const struct { uint64_t off, len; unsigned access; } v[] = {
		{4160, 1000, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE},
		{1, 1, IBV_ACCESS_REMOTE_READ},
		{0x12345, 0x54321, IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC},
		{0, 1 << 20, IBV_ACCESS_LOCAL_WRITE},
	};
	printf("# lkey 0x%x window 0x%x qpn 0x%x\n", mr->lkey, mw->rkey, qp->qp_num);
	for (int i = 0; i < 4; i++) {
		uint32_t next = (mw->rkey & ~0xffu) | ((mw->rkey + 1) & 0xff);
		struct ibv_send_wr wr = {.wr_id = i, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED, .bind_mw = {.mw = mw, .rkey = next,
			.bind_info = {.mr = mr, .addr = (uintptr_t)at + v[i].off, .length = v[i].len, .mw_access_flags = v[i].access}}}, *bad;
		if (ibv_post_send(qp, &wr, &bad))
			fail("ibv_post_send");
		mw->rkey = next;
		printf("%#llx %llu %#x ", (unsigned long long)v[i].off, (unsigned long long)v[i].len, v[i].access);
		print(sq + i * stride);
	}
	struct ibv_send_wr wr = {.opcode = IBV_WR_LOCAL_INV, .invalidate_rkey = mw->rkey}, *bad;
	if (ibv_post_send(qp, &wr, &bad))
		fail("ibv_post_send");
	printf("# LOCAL_INV of 0x%x\n", mw->rkey);
	print(sq + 4 * stride);
}

/* caps prints the capabilities granted for growing inline sizes and entry counts, where they change, for edge_test.go. */
static void caps(struct ibv_pd *pd)
{
	for (int what = 0; what < 3; what++) {
		char last[128] = "", now[128];
		for (unsigned n = 0; n <= (what ? 64 : 1100); n++) {
			struct ibv_qp_init_attr a = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
				.cap = {.max_send_wr = 5, .max_recv_wr = 3, .max_send_sge = 1, .max_recv_sge = 1}};
			*(what == 0 ? &a.cap.max_inline_data : what == 1 ? &a.cap.max_send_sge : &a.cap.max_recv_sge) = n;
			struct ibv_qp *q = ibv_create_qp(pd, &a);
			snprintf(now, sizeof now, q ? "{%u, %u, %u, %u, %u}" : "refused", a.cap.max_send_wr, a.cap.max_recv_wr, a.cap.max_send_sge, a.cap.max_recv_sge, a.cap.max_inline_data);
			if (strcmp(now, last))
				printf("%s %u: %s\n", what == 0 ? "inline" : what == 1 ? "send entries" : "receive entries", n, now);
			strcpy(last, now);
		}
	}
}

int main(int argc, char **argv)
{
	if (argc != 3 && argc != 4)
		return 2;
	mlx4 = strcmp(argv[1], "mlx4") == 0;
	const char *dir = argv[2];
	file(dir, "class/infiniband_verbs/abi_version", "6\n");
	file(dir, "class/infiniband_verbs/uverbs0/ibdev", mlx4 ? "mlx4_0\n" : "mlx5_0\n");
	file(dir, "class/infiniband_verbs/uverbs0/dev", "1:3\n");
	file(dir, "class/infiniband_verbs/uverbs0/abi_version", mlx4 ? "4\n" : "1\n");
	file(dir, "class/infiniband_verbs/uverbs0/device/modalias",
	     mlx4 ? "pci:v000015B3d00001003sv0sd0bc02sc00i00\n" : "pci:v000015B3d00001017sv0sd0bc02sc00i00\n");
	char name[32];
	snprintf(name, sizeof name, "class/infiniband/%s_0", argv[1]);
	char path[64];
	snprintf(path, sizeof path, "%s/node_type", name);
	file(dir, path, "1: CA\n");
	snprintf(path, sizeof path, "%s/node_guid", name);
	file(dir, path, "0002:c903:0000:0001\n");
	snprintf(path, sizeof path, "%s/device/modalias", name);
	file(dir, path, mlx4 ? "pci:v000015B3d00001003sv0sd0bc02sc00i00\n" : "pci:v000015B3d00001017sv0sd0bc02sc00i00\n");
	setenv("SYSFS_PATH", dir, 1);

	int n = 0;
	struct ibv_device **list = ibv_get_device_list(&n);
	if (!list || !n)
		fail("ibv_get_device_list");
	struct ibv_context *ctx = ibv_open_device(list[0]);
	if (!ctx)
		fail("ibv_open_device");
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	if (!pd)
		fail("ibv_alloc_pd");
	cq = ibv_create_cq(ctx, 4095, NULL, NULL, 0);
	if (!cq)
		fail("ibv_create_cq");
	struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = {.max_send_wr = 2048, .max_recv_wr = 16, .max_send_sge = 2, .max_recv_sge = 1, .max_inline_data = 64}};
	qp = ibv_create_qp(pd, &init);
	if (!qp)
		fail("ibv_create_qp");
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT};
	if (ibv_modify_qp(qp, &attr, IBV_QP_STATE))
		fail("INIT");
	attr.qp_state = IBV_QPS_RTR;
	if (ibv_modify_qp(qp, &attr, IBV_QP_STATE))
		fail("RTR");
	attr.qp_state = IBV_QPS_RTS;
	if (ibv_modify_qp(qp, &attr, IBV_QP_STATE))
		fail("RTS");
	if (argc == 4 && strcmp(argv[3], "bind") == 0) {
		bind(pd);
		return 0;
	}
	if (argc == 4 && strcmp(argv[3], "caps") == 0) {
		caps(pd);
		return 0;
	}
	if (argc == 4)
		repeat = atoi(argv[3]);
	if (repeat < 1 || repeat > REPEAT)
		return 2;
	if (mlx4) {
		struct mlx4dv_cq d;
		struct mlx4dv_obj o = {.cq = {.in = cq, .out = &d}};
		if (mlx4dv_init_obj(&o, MLX4DV_OBJ_CQ))
			fail("mlx4dv_init_obj");
		ring = d.buf.buf, entries = d.cqe_cnt;
	} else {
		struct mlx5dv_cq d;
		struct mlx5dv_obj o = {.cq = {.in = cq, .out = &d}};
		if (mlx5dv_init_obj(&o, MLX5DV_OBJ_CQ))
			fail("mlx5dv_init_obj");
		ring = d.buf, entries = d.cqe_cnt;
	}
	memset(mem, 1, sizeof mem);
	struct ibv_sge sge = {.addr = (uintptr_t)mem, .length = 64, .lkey = 0x1ee700};
	struct ibv_send_wr send = {.wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
	struct ibv_send_wr inl = send, read = send;
	inl.send_flags |= IBV_SEND_INLINE;
	read.opcode = IBV_WR_RDMA_READ;
	read.wr.rdma.remote_addr = (uintptr_t)mem + 4096;
	read.wr.rdma.rkey = 0x1ee700;
	for (int b = 1; b <= 16; b *= 16) {
		post("send", &send, b, 0x0a, 1);
		post("inline64", &inl, b, 0x0a, mlx4 ? 1 : 2);
		post("read", &read, b, 0x10, 1);
	}
	static double te[REPEAT];
	struct ibv_wc wc[16];
	for (int k = 0; k < repeat; k++) {
		double t = now();
		for (int i = 0; i < ROUND; i++)
			if (ibv_poll_cq(cq, 16, wc))
				fail("an entry from nowhere");
		te[k] = (now() - t) / ROUND;
	}
	report("pollempty", te, repeat);
	return 0;
}
