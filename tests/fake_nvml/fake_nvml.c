/* A stand-in for the NVIDIA driver library, scripted by the text file that $FAKE_NVML_STATE names. A test changes the
 * machine by replacing the file (a rename); each call looks with one stat() whether it was replaced.
 *
 *   init=9                                nvmlInit fails with that nvmlReturn_t
 *   count=2                               number of GPUs, as found by nvmlInit
 *   gpu0.uuid=GPU-a                       a value; a key that is missing means NOT_SUPPORTED
 *   gpu0.power_mw=!999                    the value fails with that nvmlReturn_t
 *   gpu0.energy_mj=5+700000/s@1e9#0.1     a counter: 5 at Unix time 1e9, 700000 more per second, in steps of 0.1 s
 *   gpu0.gone=15                          every call on this GPU fails with it
 *   gpu0.delay_ms=500                     every call on this GPU takes that long; "hang": until the script says otherwise
 *   gpu0.error.nvmlDeviceGetName=13       one call fails; also delay_ms.CALL, and both without "gpu0." for any GPU
 *   gpu0.field.82=uint:85                 a field value (type ulonglong, or uint); field.ID.SCOPE for a scope, as a link
 *   gpu0.mig0.uuid=MIG-a                  a value of a MIG instance
 *   events=2, event.2=0:8:79              two events so far; the second is of GPU 0, of type 8 (XID), with data 79
 *
 * Without the variable or the file there is no driver (DRIVER_NOT_LOADED). When $FAKE_NVML_LOG names a file, each call
 * appends "SECONDS enter|exit PID:NUMBER CALL gpuN" to it, so an enter without an exit is a call half done.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long u64;

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, TIMEOUT = 10, VERSION_MISMATCH = 25
};
enum { MAX_GPUS = 16, MAX_MIG = 8, MAX_KEY = 64, MAX_VALUE = 256, MAX_ENTRIES = 16384, MAX_FAULTS = 1024, POLL_US = 2000 };

struct gpu { int index, mig; }; /* mig < 0: the whole GPU */
static struct gpu gpus[MAX_GPUS], migs[MAX_GPUS][MAX_MIG];
static int initialized, num_found;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- the script ---- */

struct entry { char key[MAX_KEY], value[MAX_VALUE]; };
static struct entry *entries;
static int num_entries, loaded, num_faults;
static const char *faults[MAX_FAULTS]; /* keys of delays and errors of calls; few, so that looking for one costs little */
static int state = DRIVER_NOT_LOADED; /* what the last look at the file found */
static struct stat seen;

static int by_key(const void *a, const void *b) { return strcmp(((const struct entry *)a)->key, ((const struct entry *)b)->key); }

/* Read the script if it was replaced; holds the lock. */
static int read_script(void) {
    const char *path = getenv("FAKE_NVML_STATE");
    struct stat now;
    FILE *file;
    char line[MAX_KEY + MAX_VALUE], *equals;
    if (!path || stat(path, &now)) return DRIVER_NOT_LOADED;
    if (loaded && now.st_ino == seen.st_ino && now.st_size == seen.st_size && now.st_mtim.tv_sec == seen.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)
        return SUCCESS;
    if (!(file = fopen(path, "r"))) return DRIVER_NOT_LOADED;
    fstat(fileno(file), &seen);
    if (!entries && !(entries = malloc(MAX_ENTRIES * sizeof *entries))) abort();
    for (num_entries = 0; fgets(line, sizeof line, file);) {
        line[strcspn(line, "\r\n")] = 0;
        if (!(equals = strchr(line, '='))) continue;
        *equals = 0;
        if (num_entries == MAX_ENTRIES || strlen(line) >= MAX_KEY || strlen(equals + 1) >= MAX_VALUE) {
            fprintf(stderr, "fake_nvml: too long or too many: %s\n", line);
            abort(); /* a script that is cut short would make tests lie */
        }
        strcpy(entries[num_entries].key, line);
        strcpy(entries[num_entries++].value, equals + 1);
    }
    fclose(file);
    qsort(entries, num_entries, sizeof *entries, by_key);
    num_faults = 0;
    for (int i = 0; i < num_entries; i++) {
        if (!strstr(entries[i].key, "delay_ms") && !strstr(entries[i].key, "error.") && !strstr(entries[i].key, ".gone")) continue;
        if (num_faults == MAX_FAULTS) abort();
        faults[num_faults++] = entries[i].key;
    }
    loaded = 1;
    return SUCCESS;
}

/* Look at the script again; returns whether it may delay a call or let it fail: by its name, or all calls of a GPU. */
static int refresh(const char *call) {
    int is_scripted = 0;
    pthread_mutex_lock(&lock);
    state = read_script();
    for (int i = 0; i < num_faults && !is_scripted; i++) {
        const char *last = strrchr(faults[i], '.');
        is_scripted = last && (!strcmp(last, ".gone") || !strcmp(last, ".delay_ms") || !strcmp(last + 1, call));
    }
    pthread_mutex_unlock(&lock);
    return is_scripted;
}

static int look_up(const char *key, char *value) {
    struct entry wanted, *found;
    int result;
    snprintf(wanted.key, sizeof wanted.key, "%s", key);
    pthread_mutex_lock(&lock);
    result = state;
    if (result == SUCCESS) {
        found = num_entries ? bsearch(&wanted, entries, num_entries, sizeof *entries, by_key) : NULL;
        if (!found) result = NOT_SUPPORTED;
        else if (found->value[0] == '!') result = atoi(found->value + 1);
        else strcpy(value, found->value);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static double seconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* A number, or a counter BASE+RATE/s@ORIGIN[#STEP]. */
static u64 number_of(const char *value) {
    char *rest;
    u64 base = strtoull(value, &rest, 10);
    double rate, origin_s, step_s = 0, elapsed_s;
    if (sscanf(rest, "+%lf/s@%lf#%lf", &rate, &origin_s, &step_s) < 2) return base;
    elapsed_s = seconds(CLOCK_REALTIME) - origin_s;
    if (elapsed_s < 0) elapsed_s = 0;
    if (step_s > 0) elapsed_s = (double)(u64)(elapsed_s / step_s) * step_s;
    return base + (u64)(rate * elapsed_s);
}

/* ---- calls ---- */

struct call { const char *name; const struct gpu *gpu; unsigned number; };

static void log_call(const struct call *call, const char *what) {
    static int file = -2;
    char line[160];
    int length;
    if (file == -2) {
        const char *path = getenv("FAKE_NVML_LOG");
        file = path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
    }
    if (file < 0) return;
    length = snprintf(line, sizeof line, "%.6f %s %d:%u %s gpu%d\n", seconds(CLOCK_MONOTONIC), what, (int)getpid(),
                      call->number, call->name, call->gpu ? call->gpu->index : -1);
    if (write(file, line, (size_t)length) != length) abort();
}

static void leave(struct call *call) { log_call(call, "exit"); }

static void wait_as_scripted(const char *key) {
    char value[MAX_VALUE];
    if (look_up(key, value) != SUCCESS) return;
    if (strcmp(value, "hang")) usleep((useconds_t)(atof(value) * 1000));
    else while (look_up(key, value) == SUCCESS && !strcmp(value, "hang")) usleep(POLL_US), refresh("");
}

/* Delays and errors of a call, in this order. */
static int enter(struct call *call) {
    static unsigned calls;
    char key[128], value[MAX_VALUE];
    call->number = __sync_add_and_fetch(&calls, 1);
    log_call(call, "enter");
    if (!refresh(call->name)) return call->gpu && !initialized ? UNINITIALIZED : SUCCESS;
    snprintf(key, sizeof key, "delay_ms.%s", call->name);
    wait_as_scripted(key);
    snprintf(key, sizeof key, "error.%s", call->name);
    if (look_up(key, value) == SUCCESS) return atoi(value);
    if (!call->gpu) return SUCCESS;
    if (!initialized) return UNINITIALIZED;
    snprintf(key, sizeof key, "gpu%d.delay_ms", call->gpu->index);
    wait_as_scripted(key);
    snprintf(key, sizeof key, "gpu%d.delay_ms.%s", call->gpu->index, call->name);
    wait_as_scripted(key);
    if (!initialized) return UNINITIALIZED;
    snprintf(key, sizeof key, "gpu%d.gone", call->gpu->index);
    if (look_up(key, value) == SUCCESS) return atoi(value);
    snprintf(key, sizeof key, "gpu%d.error.%s", call->gpu->index, call->name);
    return look_up(key, value) == SUCCESS ? atoi(value) : SUCCESS;
}

#define ENTER(device)                                                                            \
    struct call call __attribute__((cleanup(leave))) = {__func__, device, 0};                    \
    int result = enter(&call);                                                                   \
    if (result != SUCCESS) return result
#define ENTER_SYSTEM()                                                                           \
    ENTER(NULL);                                                                                 \
    if (!initialized) return UNINITIALIZED
#define TRY(expression)                                                                          \
    if ((result = (expression)) != SUCCESS) return result

static int gpu_text(const struct gpu *gpu, const char *key, char *value) {
    char full[128];
    if (gpu->mig < 0) snprintf(full, sizeof full, "gpu%d.%s", gpu->index, key);
    else snprintf(full, sizeof full, "gpu%d.mig%d.%s", gpu->index, gpu->mig, key);
    return look_up(full, value);
}

static int gpu_number(const struct gpu *gpu, const char *key, u64 *number) {
    char value[MAX_VALUE];
    int result = gpu_text(gpu, key, value);
    if (result == SUCCESS) *number = number_of(value);
    return result;
}

static int gpu_unsigned(const struct gpu *gpu, const char *key, unsigned *number) {
    u64 wide = 0;
    int result = gpu_number(gpu, key, &wide);
    if (result == SUCCESS) *number = (unsigned)wide;
    return result;
}

static int numbered(const struct gpu *gpu, const char *key, unsigned number, u64 *wide) {
    char full[MAX_KEY];
    snprintf(full, sizeof full, "%s.%u", key, number);
    return gpu_number(gpu, full, wide);
}

static int copy_text(int result, const char *value, char *text, unsigned size) {
    if (result != SUCCESS) return result;
    if (strlen(value) >= size) return INSUFFICIENT_SIZE;
    strcpy(text, value);
    return SUCCESS;
}

static int num_gpus(void) {
    char value[MAX_VALUE];
    int count = look_up("count", value) == SUCCESS ? atoi(value) : 0;
    return count < MAX_GPUS ? count : MAX_GPUS;
}

#define UNSIGNED(function, key) int function(struct gpu *gpu, unsigned *number) { ENTER(gpu); return gpu_unsigned(gpu, key, number); }
#define WIDE(function, key) int function(struct gpu *gpu, u64 *number) { ENTER(gpu); return gpu_number(gpu, key, number); }
#define TEXT(function, key)                                                                      \
    int function(struct gpu *gpu, char *text, unsigned size) {                                   \
        char value[MAX_VALUE];                                                                   \
        ENTER(gpu);                                                                              \
        return copy_text(gpu_text(gpu, key, value), value, text, size);                          \
    }
#define SYSTEM_TEXT(function, key)                                                               \
    int function(char *text, unsigned size) {                                                    \
        char value[MAX_VALUE];                                                                   \
        ENTER_SYSTEM();                                                                          \
        return copy_text(look_up(key, value), value, text, size);                                \
    }

/* ---- the library and the system ---- */

int nvmlInitWithFlags(unsigned flags) {
    char value[MAX_VALUE];
    ENTER(NULL);
    (void)flags;
    result = look_up("init", value);
    if (result == SUCCESS) return atoi(value);
    if (result == DRIVER_NOT_LOADED) return result;
    for (int i = 0; i < MAX_GPUS; i++) {
        gpus[i] = (struct gpu){i, -1};
        for (int j = 0; j < MAX_MIG; j++) migs[i][j] = (struct gpu){i, j};
    }
    if (!initialized) num_found = num_gpus(); /* GPUs are looked for once, as the driver library does */
    __sync_add_and_fetch(&initialized, 1);
    return SUCCESS;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    ENTER_SYSTEM();
    __sync_sub_and_fetch(&initialized, 1);
    return SUCCESS;
}

const char *nvmlErrorString(int result) {
    static const char *const texts[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions", "Already Initialized",
        "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded", "Timeout",
        "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found", "Corrupted infoROM", "GPU is lost",
        "GPU requires restart", "The operating system has blocked the request.",
        "RM has detected an NVML/RM version mismatch.", "GPU is currently in use", "Insufficient Memory"};
    if (result >= 0 && result < (int)(sizeof texts / sizeof *texts)) return texts[result];
    return result == VERSION_MISMATCH ? "Argument version mismatch" : "Unknown Error";
}

SYSTEM_TEXT(nvmlSystemGetDriverVersion, "driver")
SYSTEM_TEXT(nvmlSystemGetNVMLVersion, "nvml")

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    char value[MAX_VALUE];
    ENTER(NULL);
    TRY(look_up("cuda", value));
    *version = atoi(value);
    return SUCCESS;
}
int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

/* ---- which GPUs ---- */

int nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER_SYSTEM();
    *count = (unsigned)num_found;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **gpu) {
    char value[MAX_VALUE];
    if (initialized && index >= (unsigned)num_found) return INVALID_ARGUMENT;
    ENTER(&gpus[index < MAX_GPUS ? index : 0]);
    TRY(gpu_text(&gpus[index], "uuid", value));
    *gpu = &gpus[index];
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, struct gpu **gpu) {
    char value[MAX_VALUE];
    ENTER_SYSTEM();
    for (int i = 0; i < num_found; i++) {
        if (!gpu_text(&gpus[i], "uuid", value) && !strcmp(value, uuid)) return *gpu = &gpus[i], SUCCESS;
        for (int j = 0; j < MAX_MIG; j++)
            if (!gpu_text(&migs[i][j], "uuid", value) && !strcmp(value, uuid)) return *gpu = &migs[i][j], SUCCESS;
    }
    return NOT_FOUND;
}

int nvmlDeviceGetIndex(struct gpu *gpu, unsigned *index) {
    ENTER(gpu);
    *index = (unsigned)(gpu->mig < 0 ? gpu->index : gpu->mig);
    return SUCCESS;
}

TEXT(nvmlDeviceGetUUID, "uuid")
TEXT(nvmlDeviceGetName, "name")
TEXT(nvmlDeviceGetSerial, "serial")
UNSIGNED(nvmlDeviceGetMinorNumber, "minor_number")
UNSIGNED(nvmlDeviceGetArchitecture, "architecture")

struct pci { char legacy[16]; unsigned domain, bus, device, device_id, subsystem_id; char bus_id[32]; };

int nvmlDeviceGetPciInfo_v3(struct gpu *gpu, struct pci *pci) {
    char value[MAX_VALUE];
    ENTER(gpu);
    TRY(gpu_text(gpu, "pci_bus_id", value)); /* 00000000:1B:00.0 */
    memset(pci, 0, sizeof *pci);
    if (sscanf(value, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device) != 3) abort();
    snprintf(pci->bus_id, sizeof pci->bus_id, "%.31s", value);
    snprintf(pci->legacy, sizeof pci->legacy, "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff, pci->device & 0xff);
    return SUCCESS;
}

/* ---- MIG ---- */

int nvmlDeviceGetMigMode(struct gpu *gpu, unsigned *current, unsigned *pending) {
    ENTER(gpu);
    TRY(gpu_unsigned(gpu, "mig_mode", current));
    if (gpu_unsigned(gpu, "mig_mode_pending", pending) != SUCCESS) *pending = *current;
    return SUCCESS;
}

UNSIGNED(nvmlDeviceGetMaxMigDeviceCount, "max_mig_devices")

int nvmlDeviceGetMigDeviceHandleByIndex(struct gpu *gpu, unsigned index, struct gpu **mig) {
    char value[MAX_VALUE];
    ENTER(gpu);
    if (gpu->mig >= 0 || index >= MAX_MIG) return INVALID_ARGUMENT;
    if (gpu_text(&migs[gpu->index][index], "uuid", value) != SUCCESS) return NOT_FOUND;
    *mig = &migs[gpu->index][index];
    return SUCCESS;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(struct gpu *mig, struct gpu **gpu) {
    ENTER(mig);
    if (mig->mig < 0) return INVALID_ARGUMENT;
    *gpu = &gpus[mig->index];
    return SUCCESS;
}

int nvmlDeviceIsMigDeviceHandle(struct gpu *gpu, unsigned *is_mig) { ENTER(gpu); *is_mig = gpu->mig >= 0; return SUCCESS; }
UNSIGNED(nvmlDeviceGetGpuInstanceId, "gpu_instance_id")
UNSIGNED(nvmlDeviceGetComputeInstanceId, "compute_instance_id")

/* ---- readings ---- */

UNSIGNED(nvmlDeviceGetPowerUsage, "power_mw")
UNSIGNED(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw")
UNSIGNED(nvmlDeviceGetPowerManagementLimit, "power_limit_mw")
UNSIGNED(nvmlDeviceGetFanSpeed, "fan_percent")
WIDE(nvmlDeviceGetTotalEnergyConsumption, "energy_mj")
UNSIGNED(nvmlDeviceGetPcieReplayCounter, "pcie_replays")
WIDE(nvmlDeviceGetSupportedClocksEventReasons, "supported_clock_event_reasons")
WIDE(nvmlDeviceGetCurrentClocksEventReasons, "clock_event_reasons")
WIDE(nvmlDeviceGetSupportedClocksThrottleReasons, "supported_clock_event_reasons")
WIDE(nvmlDeviceGetCurrentClocksThrottleReasons, "clock_event_reasons")

int nvmlDeviceGetUtilizationRates(struct gpu *gpu, unsigned rates[2]) {
    ENTER(gpu);
    TRY(gpu_unsigned(gpu, "utilization_percent", &rates[0]));
    return gpu_unsigned(gpu, "memory_utilization_percent", &rates[1]);
}

static int codec(struct gpu *gpu, const char *key, unsigned *percent, unsigned *period_us) {
    *period_us = 1000000;
    return gpu_unsigned(gpu, key, percent);
}

int nvmlDeviceGetEncoderUtilization(struct gpu *gpu, unsigned *percent, unsigned *period_us) { ENTER(gpu); return codec(gpu, "encoder_percent", percent, period_us); }
int nvmlDeviceGetDecoderUtilization(struct gpu *gpu, unsigned *percent, unsigned *period_us) { ENTER(gpu); return codec(gpu, "decoder_percent", percent, period_us); }

struct memory { unsigned version; u64 total, reserved, free, used; };

int nvmlDeviceGetMemoryInfo_v2(struct gpu *gpu, struct memory *memory) {
    ENTER(gpu);
    if (memory->version != (sizeof *memory | 2u << 24)) return VERSION_MISMATCH;
    TRY(gpu_number(gpu, "memory_total_bytes", &memory->total));
    TRY(gpu_number(gpu, "memory_reserved_bytes", &memory->reserved));
    TRY(gpu_number(gpu, "memory_used_bytes", &memory->used));
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

struct temperature { unsigned version, sensor; int celsius; };

int nvmlDeviceGetTemperatureV(struct gpu *gpu, struct temperature *temperature) {
    unsigned celsius = 0;
    ENTER(gpu);
    if (temperature->version != (sizeof *temperature | 1u << 24)) return VERSION_MISMATCH;
    if (temperature->sensor) return INVALID_ARGUMENT;
    TRY(gpu_unsigned(gpu, "temperature_c", &celsius));
    temperature->celsius = (int)celsius;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(struct gpu *gpu, unsigned sensor, unsigned *celsius) {
    ENTER(gpu);
    return sensor ? INVALID_ARGUMENT : gpu_unsigned(gpu, "temperature_c", celsius);
}

int nvmlDeviceGetTemperatureThreshold(struct gpu *gpu, unsigned threshold, unsigned *celsius) {
    u64 wide = 0;
    ENTER(gpu);
    TRY(numbered(gpu, "temperature_threshold_c", threshold, &wide));
    *celsius = (unsigned)wide;
    return SUCCESS;
}

static const char *const clock_names[] = {"graphics_clock", "sm_clock", "memory_clock", "video_clock"};

static int clock_mhz(const struct gpu *gpu, const char *prefix, unsigned clock, unsigned *mhz) {
    char key[MAX_KEY];
    if (clock >= 4) return INVALID_ARGUMENT;
    snprintf(key, sizeof key, "%s%s_mhz", prefix, clock_names[clock]);
    return gpu_unsigned(gpu, key, mhz);
}

int nvmlDeviceGetClockInfo(struct gpu *gpu, unsigned clock, unsigned *mhz) { ENTER(gpu); return clock_mhz(gpu, "", clock, mhz); }
int nvmlDeviceGetMaxClockInfo(struct gpu *gpu, unsigned clock, unsigned *mhz) { ENTER(gpu); return clock_mhz(gpu, "max_", clock, mhz); }

int nvmlDeviceGetPcieThroughput(struct gpu *gpu, unsigned counter, unsigned *kib_per_s) {
    ENTER(gpu);
    return counter > 1 ? INVALID_ARGUMENT : gpu_unsigned(gpu, counter ? "pcie_rx_kb_per_s" : "pcie_tx_kb_per_s", kib_per_s);
}

struct violation { u64 reference_us, violation; };

int nvmlDeviceGetViolationStatus(struct gpu *gpu, unsigned policy, struct violation *violation) {
    ENTER(gpu);
    TRY(numbered(gpu, "violation", policy, &violation->violation));
    violation->reference_us = (u64)(seconds(CLOCK_REALTIME) * 1e6);
    return SUCCESS;
}

struct field { unsigned id, scope; long long timestamp_us, latency_us; unsigned type; int result; union { unsigned narrow; u64 wide; } value; };

int nvmlDeviceGetFieldValues(struct gpu *gpu, int count, struct field *fields) {
    char key[MAX_KEY], value[MAX_VALUE];
    ENTER(gpu);
    for (struct field *field = fields; field < fields + count; field++) {
        snprintf(key, sizeof key, field->scope ? "field.%u.%u" : "field.%u", field->id, field->scope);
        field->timestamp_us = (long long)(seconds(CLOCK_REALTIME) * 1e6);
        field->latency_us = 0;
        field->value.wide = 0;
        field->result = gpu_text(gpu, key, value);
        if (field->result != SUCCESS) continue;
        field->type = strncmp(value, "uint:", 5) ? 3 : 1;
        if (field->type == 1) field->value.narrow = (unsigned)number_of(value + 5);
        else field->value.wide = number_of(value);
    }
    return SUCCESS;
}

/* ---- errors ---- */

int nvmlDeviceGetTotalEccErrors(struct gpu *gpu, unsigned error, unsigned counter, u64 *count) {
    char key[MAX_KEY];
    ENTER(gpu);
    if (error > 1 || counter > 1) return INVALID_ARGUMENT;
    snprintf(key, sizeof key, "ecc.%s.%s", error ? "uncorrected" : "corrected", counter ? "aggregate" : "volatile");
    return gpu_number(gpu, key, count);
}

int nvmlDeviceGetRemappedRows(struct gpu *gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failure) {
    char value[MAX_VALUE];
    ENTER(gpu);
    TRY(gpu_text(gpu, "remapped_rows", value)); /* corrected,uncorrected,pending,failure */
    if (sscanf(value, "%u,%u,%u,%u", corrected, uncorrected, pending, failure) != 4) abort();
    return SUCCESS;
}

static int retired(const struct gpu *gpu, unsigned cause, unsigned *count, u64 *pages, u64 *times) {
    u64 wanted = 0;
    unsigned room = *count;
    int result = numbered(gpu, "retired_pages", cause, &wanted);
    if (result != SUCCESS) return result;
    *count = (unsigned)wanted;
    if (!wanted) return SUCCESS;
    if (!pages || room < wanted) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < wanted; i++) {
        pages[i] = 0x10000ull * (i + 1);
        if (times) times[i] = 0;
    }
    return SUCCESS;
}

int nvmlDeviceGetRetiredPages(struct gpu *gpu, unsigned cause, unsigned *count, u64 *pages) { ENTER(gpu); return retired(gpu, cause, count, pages, NULL); }
int nvmlDeviceGetRetiredPages_v2(struct gpu *gpu, unsigned cause, unsigned *count, u64 *pages, u64 *times) { ENTER(gpu); return retired(gpu, cause, count, pages, times); }
UNSIGNED(nvmlDeviceGetRetiredPagesPendingStatus, "retired_pages_pending")

int nvmlDeviceGetNvLinkState(struct gpu *gpu, unsigned link, unsigned *active) {
    u64 wide = 0;
    ENTER(gpu);
    TRY(numbered(gpu, "nvlink_active", link, &wide));
    *active = (unsigned)wide;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkErrorCounter(struct gpu *gpu, unsigned link, unsigned counter, u64 *count) {
    char key[MAX_KEY];
    ENTER(gpu);
    snprintf(key, sizeof key, "nvlink_errors.%u.%u", link, counter);
    return gpu_number(gpu, key, count);
}

/* ---- processes ---- */

struct process { unsigned pid; u64 used_bytes; unsigned gpu_instance, compute_instance; };

static int running(struct gpu *gpu, const char *key, unsigned *count, struct process *processes) {
    char value[MAX_VALUE], *save, *word;
    unsigned room = processes ? *count : 0, number = 0;
    int result = gpu_text(gpu, key, value); /* PID:BYTES,PID:BYTES; empty for none */
    if (result != SUCCESS) return result;
    for (word = strtok_r(value, ",", &save); word; word = strtok_r(NULL, ",", &save), number++) {
        struct process process = {0, ~0ull, ~0u, ~0u};
        sscanf(word, "%u:%llu", &process.pid, &process.used_bytes);
        if (number < room) processes[number] = process;
    }
    *count = number;
    return number > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(struct gpu *gpu, unsigned *count, struct process *processes) { ENTER(gpu); return running(gpu, "processes", count, processes); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(struct gpu *gpu, unsigned *count, struct process *processes) { ENTER(gpu); return running(gpu, "graphics_processes", count, processes); }

/* ---- events ---- */

struct event_set { u64 types[MAX_GPUS]; long delivered; int watch; };
struct event { struct gpu *gpu; u64 type, data; unsigned gpu_instance, compute_instance; };

static long num_events(void) {
    char value[MAX_VALUE];
    return look_up("events", value) == SUCCESS ? atol(value) : 0;
}

/* A descriptor that becomes readable when the script is replaced: waiting costs nothing, as in the real driver. */
static int watch_script(void) {
    char directory[4096];
    const char *path = getenv("FAKE_NVML_STATE");
    int watch = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    snprintf(directory, sizeof directory, "%s", path ? path : "/");
    *(strrchr(directory, '/') + 1) = 0;
    if (inotify_add_watch(watch, directory, IN_MOVED_TO | IN_DELETE) < 0) abort();
    return watch;
}

int nvmlEventSetCreate(struct event_set **set) {
    ENTER_SYSTEM();
    if (!(*set = calloc(1, sizeof **set))) abort();
    (*set)->watch = watch_script();
    (*set)->delivered = num_events(); /* what happened before is not told */
    return SUCCESS;
}

int nvmlEventSetFree(struct event_set *set) { ENTER_SYSTEM(); close(set->watch); free(set); return SUCCESS; }
WIDE(nvmlDeviceGetSupportedEventTypes, "supported_event_types")

int nvmlDeviceRegisterEvents(struct gpu *gpu, u64 types, struct event_set *set) {
    u64 supported = 0;
    ENTER(gpu);
    TRY(gpu_number(gpu, "supported_event_types", &supported));
    if (types & ~supported) return NOT_SUPPORTED;
    set->types[gpu->index] |= types;
    return SUCCESS;
}

static int next_event(struct event_set *set, struct event *event) {
    char key[MAX_KEY], value[MAX_VALUE];
    while (set->delivered < num_events()) {
        unsigned index = 0;
        snprintf(key, sizeof key, "event.%ld", ++set->delivered);
        memset(event, 0, sizeof *event);
        if (look_up(key, value) != SUCCESS || sscanf(value, "%u:%llu:%llu", &index, &event->type, &event->data) != 3) abort();
        event->gpu = &gpus[index % MAX_GPUS];
        event->gpu_instance = event->compute_instance = ~0u;
        if (set->types[index % MAX_GPUS] & event->type) return 1;
    }
    return 0;
}

int nvmlEventSetWait_v2(struct event_set *set, struct event *event, unsigned timeout_ms) {
    double deadline_s = seconds(CLOCK_MONOTONIC) + timeout_ms / 1e3, left_s;
    struct pollfd changed = {set->watch, POLLIN, 0};
    char changes[4096];
    ENTER_SYSTEM();
    while (!next_event(set, event)) {
        if ((left_s = deadline_s - seconds(CLOCK_MONOTONIC)) <= 0) return TIMEOUT;
        if (poll(&changed, 1, (int)(left_s * 1e3) + 1) > 0 && read(set->watch, changes, sizeof changes) < 0) abort();
        refresh("");
    }
    return SUCCESS;
}

/* ---- GPM ---- */

struct sample { const struct gpu *gpu; };
struct metric { unsigned id; int result; double value; const char *short_name, *long_name, *unit; };
struct metrics { unsigned version, count; struct sample *sample1, *sample2; struct metric metrics[]; };
struct gpm_support { unsigned version, supported; };

int nvmlGpmQueryDeviceSupport(struct gpu *gpu, struct gpm_support *support) {
    ENTER(gpu);
    if (support->version != 1) return VERSION_MISMATCH;
    if (gpu_unsigned(gpu, "gpm_supported", &support->supported) != SUCCESS) support->supported = 0;
    return SUCCESS;
}

int nvmlGpmSampleAlloc(struct sample **sample) { ENTER_SYSTEM(); if (!(*sample = calloc(1, sizeof **sample))) abort(); return SUCCESS; }
int nvmlGpmSampleFree(struct sample *sample) { ENTER(NULL); free(sample); return SUCCESS; }

int nvmlGpmSampleGet(struct gpu *gpu, struct sample *sample) {
    unsigned supported = 0;
    ENTER(gpu);
    TRY(gpu_unsigned(gpu, "gpm_supported", &supported));
    if (!supported) return NOT_SUPPORTED;
    sample->gpu = gpu;
    return SUCCESS;
}

int nvmlGpmMetricsGet(struct metrics *metrics) {
    char key[MAX_KEY], value[MAX_VALUE];
    ENTER_SYSTEM();
    if (metrics->version != 1) return VERSION_MISMATCH;
    if (!metrics->sample1 || !metrics->sample2 || !metrics->sample1->gpu) return INVALID_ARGUMENT;
    if (metrics->sample1->gpu != metrics->sample2->gpu) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < metrics->count; i++) {
        snprintf(key, sizeof key, "gpm.%u", metrics->metrics[i].id);
        metrics->metrics[i].result = gpu_text(metrics->sample2->gpu, key, value);
        if (metrics->metrics[i].result == SUCCESS) metrics->metrics[i].value = atof(value);
    }
    return SUCCESS;
}
